"""A run of the real model leaves contents, gradients, versions and random states as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.tracing.state.tensor_contents import tensors_restored


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.constant = nn.Linear(2, 2), nn.BatchNorm1d(2), torch.ones(2)
        self.layer.weight.grad = torch.full((2, 2), 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(2)
            torch.add(self.layer.bias, 1, out=self.layer.bias)
        self.constant += torch.rand(2)
        return self.norm(self.layer(x)) * self.constant


def tensors(model: Writes) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), model.constant]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_comes_back(fails: bool) -> None:
    model = Writes()
    contents, gradient = [tensor.detach().clone() for tensor in tensors(model)], model.layer.weight.grad
    versions, state = [tensor._version for tensor in tensors(model)], torch.get_rng_state()
    try:
        with tensors_restored(model):
            model(torch.randn(4, 2)).sum().backward()
            model.layer.bias.requires_grad_(False)
            assert not torch.equal(model.layer.weight, contents[0])
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert all(map(torch.equal, tensors(model), contents))
    assert [tensor._version for tensor in tensors(model)] == versions
    assert torch.equal(torch.get_rng_state(), state)
    assert model.layer.weight.grad is gradient
    assert model.layer.bias.grad is None
    assert model.layer.bias.requires_grad


def test_a_parameter_that_is_not_written_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cloned = nn.Linear(2, 2), []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: cloned.append(self.shape) or clone(self))
    with tensors_restored(model):
        model(torch.ones(1, 2))
        assert cloned == []
        with torch.no_grad():
            model.bias.zero_()
        assert cloned == [(2,)]


def test_a_tensor_that_gets_other_memory_gets_its_own_back() -> None:
    """Data-dependent initialisation (ActNorm): what `.data =` puts on a parameter is not left there."""
    model = Writes()
    tensors_before = tensors(model)
    contents, places = [t.detach().clone() for t in tensors_before], [t.data_ptr() for t in tensors_before]
    with tensors_restored(model):
        model.layer.weight.data = torch.ones(5, 3, dtype=torch.float64)
        model.norm.running_mean.data = torch.full((2,), 7.0)
        model.constant.data = model.constant.data[:1]
    assert all(map(torch.equal, tensors(model), contents))
    assert [tensor.data_ptr() for tensor in tensors(model)] == places
