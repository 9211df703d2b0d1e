"""State of optimizers whose parameters are moved, with meta as the second device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.parameters import placement
from pipecompile.parameters.placement import Homes

META = torch.device("meta")


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Parameter], None]:
    """Move a parameter with its gradient to meta, as to a GPU: torch does so for new tensors alone."""

    def put(tensor: torch.Tensor, device: torch.device) -> None:
        moved = nn.Parameter(torch.empty_like(tensor, device=device))
        moved.grad = None if tensor.grad is None else torch.empty_like(tensor.grad, device=device)
        torch.utils.swap_tensors(tensor, moved)

    monkeypatch.setattr(placement, "_put", put)
    return lambda parameter: Homes().move(parameter, META)


@pytest.mark.parametrize(
    ("kind", "given", "steps"),
    [(torch.optim.Adam, {}, "cpu"), (torch.optim.Adam, {"capturable": True}, "meta"), (torch.optim.Adagrad, {}, "cpu")],
)
def test_state_follows_before_the_next_step(
    kind: Any, given: dict[str, Any], steps: str, move: Callable[[nn.Parameter], None]
) -> None:
    """A model whose optimizer had stepped, or had loaded a checkpoint, failed at its first step after compile."""
    moved, kept = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = kind([moved, kept], lr=0.1, foreach=False)
    moved.grad, kept.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0].update(given)
    move(moved)
    assert {value.device.type for value in optimizer.state[moved].values()} == {"cpu"}
    assert weakref.getweakrefcount(moved) == 0  # torch.utils.swap_tensors refuses tensors that have some
    kept.grad = None
    moved.grad = None if given else moved.grad  # torch has no such step on meta
    optimizer.step()
    devices = {key: value.device.type for key, value in optimizer.state[moved].items()}
    assert devices.pop("step") == steps
    assert {*devices.values()} == {"meta"}
    assert {value.device.type for value in optimizer.state[kept].values()} == {"cpu"}


def test_state_that_was_elsewhere_before_stays(move: Callable[[nn.Parameter], None]) -> None:
    """An optimizer may keep its state in another memory than its parameters on purpose."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"far": torch.ones(3, device="meta"), "count": 3}
    move(parameter)
    other = nn.Parameter(torch.ones(3))
    later = torch.optim.SGD([other], lr=0.1)
    later.state[other]["far"] = torch.ones(3, device="meta")
    later.step()
    assert later.state[other]["far"].is_meta
    optimizer.step()
    assert optimizer.state[parameter]["count"] == 3
