"""Options: what spans several keywords, what is left open, and the schedule."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.ir import Kind
from pipecompile.ir.candidates import Candidate, Considered
from pipecompile.ir.plan import StageSummary
from pipecompile.options import Options
from pipecompile.schedules import build_schedule

MODEL = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
USUAL = {name: each.default for name, each in inspect.signature(pc.compile).parameters.items()}
NOT_IN_OPTIONS = ("model", "n_stages", "example_args", "example_kwargs", "mesh")


def options(n_stages: int = 2, **keywords: Any) -> Options:
    usual = {name: value for name, value in USUAL.items() if name not in NOT_IN_OPTIONS}
    return Options.of(MODEL, n_stages, **(usual | {"devices": ["cpu"] * n_stages} | keywords))


def plan(considered: Considered | None = None) -> pc.Plan:
    stages = tuple(StageSummary(s, "cpu", "a", "b", 1, 20, 80.0, 1.0, 2.0, 0.0, 0.0, 0, 0) for s in range(2))
    return pc.Plan(
        "f", 2, ("cpu",) * 2, (0, 1), {}, (), stages, 1.0, 1.0, "optimal", "dp", "analytic", considered=considered
    )


def test_every_keyword_is_an_attribute_or_is_resolved_to_another() -> None:
    made = options()
    resolved = {"optimizer", "split_before", "keep_together", "pin", "balance"}
    for name in USUAL.keys() - {"model", "example_args", "example_kwargs", "mesh"} - resolved:
        assert hasattr(made, name), name
    assert options(optimizer="adam").optimizer_state == 2
    assert options(pin={"1": 0}).steering.pins == (("1", 0),)


def test_a_missing_or_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="cache_sise"):
        options(cache_sise=3)


def test_a_change_is_checked_like_a_new_one() -> None:
    with pytest.raises(pc.InputError, match="n_microbatches=0"):
        replace(options(), n_microbatches=0)
    with pytest.raises(pc.ScheduleError, match="3 stages on 3 devices"):
        replace(options(), schedule=build_schedule("gpipe", 3, 4))


def test_options_can_be_copied_and_sent() -> None:
    made = options(pin={"1": 0}, checkpoint=[True, False], memory_limit=[1, 2])
    assert made.kinds
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made
        assert again.schedule_for(4) == made.schedule_for(4)


@pytest.mark.parametrize("other", [{"pin": {"1": 0}}, {"costs": {"1": 1.0}}])
def test_a_plan_excludes_what_would_be_solved(other: dict[str, Any]) -> None:
    assert options(plan=plan()).plan is not None
    with pytest.raises(pc.InputError, match=r"(?s)plan is given together with.*nothing is solved"):
        options(plan=plan(), **other)


def test_the_plan_has_as_many_stages() -> None:
    with pytest.raises(pc.InputError, match=r"(?s)the plan has 2 stages, n_stages is 3.*try    n_stages=2"):
        options(3, plan=plan())


@pytest.mark.parametrize(
    "keywords",
    [{"split_before": ["haed"]}, {"keep_together": [["body", "haed"]]}, {"pin": {"haed": 1}}, {"costs": {"haed": 1.0}}],
)
def test_names_are_compared_with_the_recording(keywords: dict[str, Any]) -> None:
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 4)))
    graph = pc.trace(model, torch.ones(2, 4))
    right = {key: json.loads(json.dumps(value).replace("haed", "head")) for key, value in keywords.items()}
    options(**right).check_names(graph)
    with pytest.raises(pc.InputError, match="'head'"):
        options(**keywords).check_names(graph)


def test_an_open_number_of_micro_batches_needs_something_to_choose_by() -> None:
    assert options(n_microbatches="auto").has_open_choice
    for other in ({"schedule": build_schedule("gpipe", 2, 4)}, {"costs": {"1": 1.0}}, {"plan": plan()}):
        with pytest.raises(pc.InputError, match='n_microbatches="auto" is given together with'):
            options(n_microbatches="auto", **other)


def test_a_number_of_micro_batches_is_that_of_the_schedule() -> None:
    schedule = build_schedule("gpipe", 2, 4)
    assert options(schedule=schedule, n_microbatches=4).default_microbatches == 4
    with pytest.raises(pc.InputError, match=r"n_microbatches=8 is given together with a Schedule[^$]*n_microbatches=4"):
        options(schedule=schedule, n_microbatches=8)


def test_a_choice_left_open_is_that_of_the_plans_best_candidate() -> None:
    considered = Considered((Candidate(2, "gpipe", seconds=2.0), Candidate(4, "zb-h1", seconds=1.0)), chosen=1)
    opened = options(n_microbatches="auto", schedule="auto", plan=plan(considered))
    settled = opened.with_choice_of(plan(considered))
    assert (settled.n_microbatches, settled.schedule) == (4, "zb-h1")
    kept = options(n_microbatches=8, schedule="auto").with_choice_of(plan(considered))
    assert (kept.n_microbatches, kept.schedule) == (8, "zb-h1")
    fixed = options()
    assert fixed.with_choice_of(plan(considered)) is fixed
    assert opened.with_choice_of(None) is opened


def test_recomputation_left_open_is_that_of_the_plan() -> None:
    opened = options(checkpoint="auto")
    assert opened.recompute == "auto"
    assert opened.with_recompute((True, False)).recompute == (True, False)
    assert opened.with_recompute(()).recompute is None
    fixed = options(checkpoint="always")
    assert fixed.with_recompute((True, False)) is fixed


@pytest.mark.parametrize(
    ("checkpoint", "recompute", "at_once"),
    [
        ("never", None, 1),
        ("always", (True, True), 3),
        ("except_last", (True, True), 4),
        ([True, False], (True, False), 1),
    ],
)
def test_stages_that_recompute_restore_so_many_micro_batches_at_once(
    checkpoint: Any, recompute: Any, at_once: int
) -> None:
    made = options(checkpoint=checkpoint, restored=3)
    assert made.recompute == recompute
    assert made.restored_at_once(4) == at_once
    assert made.restored_at_once(1) == min(at_once, 3)


def test_the_number_of_micro_batches_is_that_of_the_keyword_the_schedule_or_twice_the_devices() -> None:
    assert options(n_microbatches=3).default_microbatches == 3
    assert options(3).default_microbatches == 6
    assert options(schedule=build_schedule("gpipe", 2, 5)).default_microbatches == 5


def test_the_schedule_has_the_recomputation_that_is_asked_for() -> None:
    assert options(checkpoint="always").kinds == {Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD}
    assert options(checkpoint="auto").kinds == {Kind.FORWARD, Kind.BACKWARD}
    assert options(schedule="forward").kinds == {Kind.FORWARD}
    assert not options(schedule="forward").has_backward
    assert options(schedule="auto").schedule_for(4).name == "interleaved"


def test_a_schedule_is_for_its_own_number_of_micro_batches() -> None:
    made = options(schedule=build_schedule("gpipe", 2, 5))
    assert made.schedule_for(5).n_microbatches == made.schedule_for(4, custom=False).n_microbatches == 5
    with pytest.raises(pc.ScheduleError, match="for 5 micro-batches, the batch gives 4"):
        made.schedule_for(4)


def test_devices_that_a_schedule_cannot_use_are_counted_in_the_hint() -> None:
    with pytest.raises(pc.ScheduleError, match="devices= with 1 entry,"):
        options(schedule="zbv")
    with pytest.raises(pc.ScheduleError, match="devices= with 4 entries,"):
        options(4, devices=["cpu"] * 3)


def test_a_builder_must_return_a_schedule() -> None:
    with pytest.raises(pc.ScheduleError, match="returned None, not a Schedule"):
        options(schedule=lambda *counts: None)


def test_a_schedule_that_deadlocks_is_refused() -> None:
    with pytest.raises(pc.VerifyError):
        options(schedule=pc.Schedule.from_csv("0B0,0F0\n1F0,1B0\n"))
