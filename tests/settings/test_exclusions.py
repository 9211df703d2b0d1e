"""Keywords that exclude or need each other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.passes import lower
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import build_schedule
from pipecompile.settings.exclusions import EXCLUDED_BY_SLICES, check_offload, check_plan, check_reshard, check_slices
from tests.support.decoders import token_loss

SCHEDULE = build_schedule("seq1f1b", 2, 2, n_slices=2)
PROGRAM = WrittenProgram.of(lower(build_schedule("1f1b", 2, 4)))
USUAL: dict[str, Any] = dict.fromkeys(EXCLUDED_BY_SLICES) | {"loss_fn": token_loss}


def test_a_schedule_with_whole_backwards_runs() -> None:
    check_slices(SCHEDULE, SimpleNamespace(**USUAL))
    check_slices(SCHEDULE, SimpleNamespace(**USUAL | {"across_batch": "each"}))


@pytest.mark.parametrize("name", EXCLUDED_BY_SLICES)
def test_keywords_that_it_excludes(name: str) -> None:
    value = "exact" if name == "across_batch" else True
    with pytest.raises(
        ScheduleError, match=f"'seq1f1b', of 2 slices per micro-batch, is given together with {name}"
    ) as caught:
        check_slices(SCHEDULE, SimpleNamespace(**USUAL | {name: value}))
    assert caught.value.why == EXCLUDED_BY_SLICES[name]
    assert caught.value.hint


def test_a_loss_function_is_needed() -> None:
    with pytest.raises(ScheduleError, match="is given without loss_fn"):
        check_slices(SCHEDULE, SimpleNamespace(**USUAL | {"loss_fn": None}))


def test_divided_backwards_are_refused() -> None:
    with pytest.raises(ScheduleError, match="has divided backwards, I and W"):
        check_slices(split_backward(SCHEDULE), SimpleNamespace(**USUAL))


PLAN = pc.compile(
    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, example_args=(torch.ones(4, 4),), cost="analytic"
).plan


@pytest.mark.parametrize("checkpoint", ["never", "always", (True, False)])
def test_a_plan_without_constraints_is_accepted(checkpoint: Any) -> None:
    check_plan(PLAN, (), None, checkpoint)


def test_recomputation_left_open_is_that_of_a_plan_which_has_it() -> None:
    check_plan(replace(PLAN, recompute=(False, False)), (), None, "auto")
    with pytest.raises(InputError, match='checkpoint="auto" is given together with a plan'):
        check_plan(PLAN, (), None, "auto")


@pytest.mark.parametrize(("steering", "costs", "words"), [(("a",), None, "constraints"), ((), {"0": 1.0}, "costs")])
def test_what_a_plan_excludes_is_refused(steering: Any, costs: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"plan is given together with {words}"):
        check_plan(PLAN, steering, costs, "never")


@pytest.mark.parametrize("checkpoint", ["never", (False, False)])
@pytest.mark.parametrize("schedule", ["1f1b", build_schedule("gpipe", 2, 4)])
def test_a_schedule_without_recomputation_is_accepted(schedule: Any, checkpoint: Any) -> None:
    check_offload(schedule, checkpoint, "each")


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "across_batch", "words"),
    [
        ("auto", "never", None, 'schedule="1f1b"'),
        ("1f1b", "auto", None, "recomputed or offloaded, not both"),
        ("1f1b", (True, False), None, "one of the two"),
        ("gpipe", "never", "exact", "two programs"),
        (PROGRAM, "never", None, "a Program"),
    ],
)
def test_what_offload_excludes_is_refused(schedule: Any, checkpoint: Any, across_batch: Any, words: str) -> None:
    with pytest.raises(InputError, match="offload=True is given together with") as caught:
        check_offload(schedule, checkpoint, across_batch)
    assert words in str(caught.value)


@pytest.mark.parametrize("schedule", ["1f1b", build_schedule("gpipe", 2, 2)])
def test_sharded_parameters_can_be_freed(schedule: Any) -> None:
    check_reshard(2, schedule, offload=False, across_batch="each")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shards": 1}, "without a mesh that has dp_shard"),
        ({"schedule": "auto"}, 'together with schedule="auto"'),
        ({"schedule": PROGRAM}, "together with a Program"),
        ({"offload": True}, "together with offload=True"),
        ({"across_batch": "exact"}, 'together with across_batch="exact"'),
    ],
)
def test_what_it_excludes_is_refused(changes: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"shards": 2, "schedule": "1f1b", "offload": False, "across_batch": None}
    with pytest.raises(InputError, match=f"reshard_after_forward=True is given {words}") as caught:
        check_reshard(**usual | changes)
    assert caught.value.why
    assert caught.value.hint
