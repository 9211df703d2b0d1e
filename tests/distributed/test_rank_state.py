"""Ranks as threads, each with a model of its own, of which it owns one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.distributed.rank_state import RankState
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators


class Model(nn.Sequential):
    """Two layers and extra state, which is not a tensor."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data.fill_(value)
        self.extra = f"of {value:.0f}"

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


FIRST = {"0.weight", "0.bias", "_extra_state"}
SECOND = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}


def on_ranks(function: Callable[[RankState], Any]) -> list[Any]:
    """Layer 0 lives on device 0, layer 1 on device 1. The tensors of rank r have the value r."""

    def run(communicator: ThreadCommunicator) -> Any:
        model = Model(float(communicator.ranks.index))
        second = {id(tensor) for tensor in (*model[1].parameters(), *model[1].buffers())}
        return function(RankState(model, lambda tensor: int(id(tensor) in second), communicator))

    return run_communicators(2, run)


def test_every_rank_has_the_keys_of_its_tensors() -> None:
    assert on_ranks(lambda state: state.keys()) == [FIRST, SECOND]
    assert on_ranks(lambda state: state.own().keys()) == [FIRST, SECOND]


def test_entries_are_detached_unless_variables_are_asked_for() -> None:
    for kept, detached in zip(
        *(on_ranks(lambda state, k=k: state.own(keep_vars=k)) for k in (True, False)), strict=True
    ):  # type: ignore[misc]
        assert any(isinstance(value, nn.Parameter) for value in kept.values())
        assert not any(isinstance(value, nn.Parameter) for value in detached.values())


def test_before_tensors_are_placed_every_rank_has_all_of_them() -> None:
    def keys(communicator: ThreadCommunicator) -> set[str]:
        return RankState(Model(), lambda tensor: None, communicator).keys()

    first, second = run_communicators(2, keys)
    assert first == FIRST | SECOND
    assert second == first - {"_extra_state"}


def test_every_rank_gets_the_full_state_from_the_owners() -> None:
    for state in on_ranks(lambda state: state.full()):
        assert list(state) == list(Model().state_dict())
        assert state["_extra_state"] == "of 0"
        assert all((state[key] == (key in SECOND)).all() for key in state if key != "_extra_state")


def test_a_rank_loads_its_part_of_a_whole_state_and_what_is_not_trained() -> None:
    """The loss may read buffers and frozen weights of another rank, as those of the normalization here; a recording extra state."""

    def load(state: RankState) -> tuple[list[bool], str]:
        state.load(Model(5.0).state_dict(), strict=True, assign=False)
        values = [
            bool((tensor == 5).all())
            for tensor in state.model.state_dict().values()
            if isinstance(tensor, torch.Tensor)
        ]
        return values, state.model.extra

    (first, extra), (second, other) = on_ranks(load)
    assert first == [True] * 2 + [False] * 2 + [True] * 3
    assert second == [False] * 2 + [True] * 5
    assert (extra, other) == ("of 5", "of 5")


@pytest.mark.parametrize("strict", [True, False])
def test_missing_and_unknown_keys_of_a_rank_are_errors_if_strict(*, strict: bool) -> None:
    entries = {key: value for key, value in Model(5.0).state_dict().items() if key not in ("0.weight", "1.weight")}

    def load(state: RankState) -> str:
        try:
            state.load(entries | {"2.weight": torch.ones(1)}, strict=strict, assign=False)
        except RuntimeError as error:
            return str(error)
        return ""

    expected = [f"state_dict of rank {10 + r}: missing ['{r}.weight'], unexpected ['2.weight']" for r in range(2)]
    assert on_ranks(load) == (expected if strict else ["", ""])
