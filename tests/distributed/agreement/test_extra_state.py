"""Extra state of modules on the ranks that run them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.distributed.agreement.extra_state import device_of_module, extra_state_keys

SCRIPTS = ["extra state"]


class Counted(nn.Module):
    """A layer that counts its calls after it was used, so that the count is made where the layer runs."""

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.linear, self.calls, self.counts, self.seen = nn.Linear(4, 4), 0, counts, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.counts:
            self.calls += 1
        return y

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Idle(Counted):
    """A layer that does not run."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.idle, self.plain = Counted(counts=False), Counted(), Idle(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.plain(self.first(x)))


def test_keys_are_those_of_modules_with_extra_state_of_their_own() -> None:
    model = Model()
    keys = extra_state_keys(model)
    assert keys == {f"{name}._extra_state": name for name in ("first", "last", "idle")}
    assert keys.keys() <= model.state_dict().keys()
    assert extra_state_keys(Counted()) == {"_extra_state": ""}


def test_extra_state_lives_where_the_module_runs_and_else_with_the_last_stage() -> None:
    model = Model()
    pins = {"first": 0, "last": 1}
    pipe = pc.compile(
        model, 2, devices=["cpu"] * 2, example_args=(torch.randn(4, 4),), n_microbatches=2, pin=pins, cost="analytic"
    )
    homes = {
        name: device_of_module(model, name, pipe._cache.entries) for name in ("first", "last", "idle", "first.linear")
    }
    assert homes == {"first": 0, "last": 1, "idle": 1, "first.linear": 0}


def test_a_count_is_taken_from_the_stage_that_counts() -> None:
    """It may be another one than that of the layer: a number depends on no tensor."""
    model = nn.Sequential(Counted(), nn.Linear(4, 4))
    pipe = pc.compile(
        model,
        2,
        devices=["cpu"] * 2,
        example_args=(torch.randn(4, 4),),
        n_microbatches=2,
        pin={"0.linear": 0, "1": 1},
        cost="analytic",
    )
    (recording,) = pipe._cache.entries
    counting = [
        stage.index for stage in recording.stages if any(hasattr(n.target, "place") for n in stage.module.graph.nodes)
    ]
    assert [device_of_module(model, "0", [recording])] == counting


@pytest.mark.timeout(700)
def test_the_rank_that_runs_a_module_has_its_extra_state(said: dict[str, list[str]]) -> None:
    """The first rank had that of all modules, as it was when the model was built, before."""
    wholes, owns = set(), dict[str, int]()
    for text in said["extra state"]:
        whole, own, part, loss, _ = eval(text.splitlines()[0].removeprefix("result: "))
        wholes.add(str(whole))
        owns |= own
        assert part == [1.389834, {"calls": 42, "factor": 3.0}]
        assert loss == 0.72827
    assert wholes == {"{'0._extra_state': 4, '2._extra_state': 4}"}
    assert owns == {"0._extra_state": 4, "2._extra_state": 4}
