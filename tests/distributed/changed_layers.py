"""A script of ranks: layers are replaced after steps, then a new optimizer is made, and training goes on as in one process.

kind              what all ranks do after two steps
block             model[1] = Block()           another rank may run it after the next cut
parametrization   weight_norm(model[2].linear) computed from a trained weight, which one rank has
loaded            model.load_state_dict(..., assign=True)
copied            model[3] = deepcopy(model[0]) of another rank: the warning tells of it
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import pipecompile as pc
from tests.distributed.mistakes import square

__all__ = ["changed_layers"]


class ChangedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()


def replace_block(model: Any) -> None:
    torch.manual_seed(3)
    model[1] = ChangedBlock()


def load(model: Any) -> None:
    torch.manual_seed(4)
    model.load_state_dict(blocks().state_dict(), assign=True)


def copy_first(model: Any) -> None:
    model[3] = copy.deepcopy(model[0])


CHANGES: dict[str, Callable[[Any], object]] = {
    "block": replace_block,
    "parametrization": lambda model: weight_norm(model[2].linear),
    "loaded": load,
    "copied": copy_first,
}


def blocks() -> nn.Sequential:
    return nn.Sequential(*(ChangedBlock() for _ in range(4)))


def changed_layers(rank: int) -> dict[str, Any]:
    """Return per kind whether all losses and the state at the end are those of the plain loop, and how often values are warned of."""
    return {kind: _compared(change) for kind, change in CHANGES.items()}


def _compared(change: Callable[[Any], object]) -> Any:
    torch.manual_seed(0)
    model = blocks()
    eager, (x, y) = copy.deepcopy(model), torch.randn(2, 5, 8, 8).unbind()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pc.compile(model, 2, loss_fn=square, n_microbatches=2, cost="analytic", example_args=(x[0],))
        optimizers = [_optimizer(each) for each in (pipe, eager)]
        equal = []
        for step in range(5):
            if step == 2:
                change(model)
                change(eager)
                optimizers = [_optimizer(each) for each in (pipe, eager)]
            losses = [pipe.step(x[step], target=y[step]), _loop(eager, x[step], y[step])]
            equal.append(torch.equal(*losses))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    state, expected = pipe.full_state_dict(), eager.state_dict()
    equal.append(all(torch.equal(state[key], value) for key, value in expected.items()))
    return all(equal), sum("other values" in str(each.message) for each in caught)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = [square(model(part), target) / 2 for part, target in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    return sum(losses, torch.zeros(())).detach()
