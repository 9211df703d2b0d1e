"""The state of a model and of the thread, noted before a run and compared after it."""

from __future__ import annotations

import torch
from torch import nn


class ModelState:
    """Everything about a model and the thread that a run must leave as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.identity = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
        self.grads = [
            (parameter.grad, None if parameter.grad is None else parameter.grad.clone())
            for parameter in model.parameters()
        ]
        self.ambient = self._ambient()
        self.random = torch.get_rng_state()

    def check(self) -> None:
        """Fail unless contents are equal bit for bit, and the objects are the same."""
        now = self.model.state_dict()
        assert now.keys() == self.tensors.keys()
        assert [name for name in now if not torch.equal(now[name], self.tensors[name])] == []
        assert [id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())] == self.identity
        for parameter, (grad, content) in zip(self.model.parameters(), self.grads, strict=True):
            assert parameter.grad is grad
            assert grad is None or (content is not None and torch.equal(grad, content))
        assert self._ambient() == self.ambient
        assert torch.equal(torch.get_rng_state(), self.random)

    def _ambient(self) -> tuple[object, ...]:
        modes = [module.training for module in self.model.modules()]
        required = [parameter.requires_grad for parameter in self.model.parameters()]
        return (
            modes,
            required,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_inference_mode_enabled(),
        )
