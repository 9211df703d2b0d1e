"""The parameters of a row of three stages, of which the first and the last share a weight. Collectives are noted, not run."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from pipecompile.distributed.data_parallel.sharded_row import ShardedRow
from pipecompile.errors import InputError
from pipecompile.ir import Action, Schedule
from pipecompile.passes import lower
from pipecompile.runtime.registers import Frame
from pipecompile.torch_private.hidden_values import is_hidden, show

ROW = "0UNSHARD,1UNSHARD,0F0,0RESHARD,1F0,2UNSHARD,2F0,2B0,2RESHARD,2REDUCE_GRAD,1B0,1RESHARD,1REDUCE_GRAD,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD"


class Parameter:
    """A sharded parameter that is whole or not."""

    def __init__(self, size: int) -> None:
        self.whole, self.memory, self.is_whole = nn.Parameter(torch.ones(size)), torch.ones(size), False


class Shards:
    """Note what is started, finished and released, by the places of the parameters."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters, self.log, self.is_by_stage = parameters, list[str](), True

    def names(self, parameters: Any) -> str:
        return "".join("abcd"[self.parameters.index(one)] for one in parameters)

    def of(self, weights: Any) -> list[Parameter]:
        return [one for one in self.parameters if id(one.whole) in weights]

    def apart_from(self, weights: Any) -> list[Parameter]:
        return [one for one in self.parameters if id(one.whole) not in weights]

    def start(self, parameters: Any) -> list[Any]:
        self.log.append(f"gather {self.names(parameters)}")
        return [SimpleNamespace(parameters=parameters)]

    def finish(self, gatherings: Any) -> None:
        for gathering in gatherings:
            for one in gathering.parameters:
                one.is_whole = True
                show(one.whole)
            self.log.append(f"whole {self.names(gathering.parameters)}")

    def release(self, parameters: Any) -> None:
        for one in parameters:
            one.is_whole = False
        self.log.append(f"free {self.names(parameters)}")

    def gather_rest(self) -> None:
        self.log.append("gather all")
        self.is_by_stage = False


@pytest.fixture
def shards() -> Shards:
    return Shards([Parameter(size) for size in (1, 2, 3, 4)])


def row_of(shards: Shards, *, is_unlike: bool = False, used: Collection[int] = (), schedule: str = ROW) -> ShardedRow:
    """Stage 0 has a and b, stage 1 has c, stage 2 has a; d is of no stage. The loss uses the weights with the ids `used`."""
    a, b, c, _ = (id(one.whole) for one in shards.parameters)
    reduced = lambda weights: shards.log.append(f"reduce {shards.names(shards.of(weights))}")  # noqa: E731 a stand-in
    replicas = SimpleNamespace(
        shards=shards, group="copies", is_unlike=is_unlike, reduce=reduced, loss_weights=frozenset(used)
    )
    (row,) = lower(Schedule.from_csv(schedule)).rows
    return ShardedRow(cast(Any, replicas), row, [frozenset({a, b}), frozenset({c}), frozenset({a})])


def run(row: ShardedRow, actions: str) -> None:
    for text in actions.split(","):
        action = Action.parse(text)
        if action.microbatch < 0:
            row.run(action)(Frame([], []))
        else:
            row.around(action, lambda frame: None, ())(Frame([], []))


def test_a_shared_weight_is_gathered_once_and_reduced_with_its_last_stage(shards: Shards) -> None:
    row = row_of(shards)
    row.begin()
    run(row, ROW)
    assert shards.log == [
        "gather d", "whole d", "gather ab", "gather c", "whole ab", "free ab", "whole c", "gather a", "whole a", "free a", "reduce ",
        "free c", "reduce c", "gather ab", "whole ab", "free ab", "reduce ab",
    ]  # fmt: skip


def test_a_weight_that_a_value_is_a_view_of_stays(shards: Shards) -> None:
    row = row_of(shards)
    row.begin()
    run(row, "0UNSHARD")
    frame = Frame([shards.parameters[1].memory.view(2, 1)], [])
    row.around(Action.parse("0F0"), lambda frame: None, [0])(frame)
    run(row, "0RESHARD")
    assert shards.log[-1] == "free a"


def test_copies_with_other_programs_gather_all_and_actions_do_nothing(shards: Shards) -> None:
    row = row_of(shards, is_unlike=True)
    row.begin()
    run(row, ROW)
    assert [entry for entry in shards.log if not entry.startswith("reduce")] == ["gather all"]


def test_the_last_stage_uses_what_the_loss_uses(shards: Shards) -> None:
    row = row_of(shards, used=[id(shards.parameters[1].whole)])
    row.begin()
    run(row, ROW)
    assert shards.log == [
        "gather d", "whole d", "gather ab", "gather c", "whole ab", "free ab", "whole c", "gather ab", "whole ab", "free ab", "reduce ",
        "free c", "reduce c", "gather ab", "whole ab", "free ab", "reduce ab",
    ]  # fmt: skip


def test_what_the_loss_uses_is_whole_where_no_action_gathers_the_last_stage(shards: Shards) -> None:
    schedule = "0UNSHARD,0F0,0RESHARD,1F0,2F0,2B0,1B0,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD"
    row = row_of(shards, used=[id(shards.parameters[1].whole)], schedule=schedule)
    row.begin()
    run(row, schedule)
    assert shards.log[:4] == ["gather bcd", "whole bcd", "gather a", "whole a"]
    assert shards.log[4] == "free a"


def test_a_freed_weight_cannot_be_read(shards: Shards) -> None:
    """Its shape and gradient can, and its values again once it is gathered."""
    row, weight = row_of(shards), shards.parameters[2].whole
    row.begin()
    for read in (
        lambda: weight + 1,
        lambda: weight.detach(),
        lambda: weight.data,
        lambda: torch.nn.functional.relu(weight),
    ):
        with pytest.raises(
            InputError, match=r"read while it is sharded.*\n.*\n.*insert_sharding\(schedule, \[0, 2\]\)"
        ):
            read()
    assert (weight.shape, weight.grad) == ((3,), None)
    run(row, "0UNSHARD,0F0,1UNSHARD,1F0")
    assert not is_hidden(weight)
    assert weight.sum() == 3
    run(row, "1RESHARD")
    assert is_hidden(weight)
