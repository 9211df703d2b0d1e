"""Lowering and binding: one executable per kind of run and number of micro-batches, made once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.programs import breadth_first, call_executable, step_executable, step_schedule
from pipecompile.driver.specialization import Specialization
from pipecompile.ir import Kind
from pipecompile.runtime.executable import Executable
from tests.support.compilations import options_of, specialized


@pytest.fixture(scope="module")
def compiled() -> Specialization:
    return specialized()


@pytest.fixture
def own(compiled: Specialization) -> Specialization:
    """The specialization without programs."""
    return replace(compiled, executables={}, schedules={})


def kinds(executable: Executable) -> set[Kind]:
    return {i.action.kind for row in executable.program.rows for i in row if i.action is not None}


def test_a_step_runs_the_schedule_with_its_loss(own: Specialization) -> None:
    executable = step_executable(own, 3, with_target=False)
    assert executable.program.n_microbatches == 3
    assert {Kind.FORWARD, Kind.BACKWARD} <= kinds(executable)
    assert "@loss" in str(executable.program)
    assert "@target" not in str(executable.program)
    assert "@target" in str(step_executable(own, 3, with_target=True).program)


def test_a_step_without_gradients_has_forwards_and_the_loss(own: Specialization) -> None:
    """Stages that recompute have nothing to recompute for."""
    own.options = options_of(checkpoint="always")
    executable = step_executable(own, 3, with_target=True, kind="loss")
    assert kinds(executable) == {Kind.FORWARD}
    assert "@loss" in str(executable.program)
    assert "@target" in str(executable.program)
    assert step_executable(own, 3, with_target=True) is not executable


def test_a_call_has_a_backward_only_on_request(own: Specialization) -> None:
    assert kinds(call_executable(own, 2, with_backward=False)) == {Kind.FORWARD}
    assert kinds(call_executable(own, 2, with_backward=True)) == {Kind.FORWARD, Kind.BACKWARD}
    assert "@loss" not in str(call_executable(own, 2, with_backward=True).program)


def test_a_call_recomputes_if_the_options_say_so(own: Specialization) -> None:
    own.options = options_of(checkpoint="always")
    assert Kind.RECOMPUTE in kinds(call_executable(own, 2, with_backward=True))
    assert Kind.RECOMPUTE not in kinds(call_executable(own, 2, with_backward=False))
    assert Kind.RECOMPUTE in kinds(step_executable(own, 2, with_target=False))


def test_every_kind_of_run_is_bound_once(own: Specialization) -> None:
    runs = [
        lambda: step_executable(own, 2, with_target=False),
        lambda: step_executable(own, 2, with_target=True),
        lambda: step_executable(own, 3, with_target=False),
        lambda: call_executable(own, 2, with_backward=False),
        lambda: call_executable(own, 2, with_backward=True),
    ]
    first = [run() for run in runs]
    assert len({id(executable) for executable in first}) == 5
    assert all(run() is executable for run, executable in zip(runs, first, strict=True))


def test_the_phases_are_logged(own: Specialization) -> None:
    step_executable(own, 3, with_target=False)
    n_instructions = sum(map(len, step_executable(own, 3, with_target=False).program.rows))
    assert own.log.lines["lower"] == f"{n_instructions} instructions, 3 micro-batches"
    assert "bind" in own.log.seconds


def test_the_schedule_of_a_step_is_made_once_per_number(own: Specialization) -> None:
    own.options = options_of(schedule="gpipe")
    schedule = step_schedule(own, 3)
    assert (schedule.name, schedule.n_microbatches) == ("gpipe", 3)
    assert step_schedule(own, 3) is schedule
    assert step_schedule(own, 4).n_microbatches == 4


def test_stages_cannot_leave_the_devices_of_their_parameters(own: Specialization) -> None:
    own.stage_devices = (torch.device("cpu"), torch.device("meta"))
    with pytest.raises(pc.ScheduleError, match=r"puts stages on devices \(0, 1\)"):
        step_schedule(own, 2)
    assert not own.schedules


def _copies_of_four(n_stages: int, n_microbatches: int, n_devices: int) -> pc.Schedule:
    """A schedule that has several copies of its stages for four micro-batches."""
    return pc.build_schedule(
        "chimera" if n_microbatches == 4 else "1f1b", n_stages, n_microbatches, n_devices=n_devices
    )


@pytest.mark.parametrize("schedule", ["chimera", _copies_of_four])
def test_options_exclude_copies_of_stages_for_every_number_of_micro_batches(own: Specialization, schedule: Any) -> None:
    """They were excluded for the number of `compile` alone, and a list of four ran beside a limit of memory."""
    own.options = options_of(schedule=schedule, n_microbatches=1, memory_limit=1e9)
    assert not step_schedule(own, 1).directions
    with pytest.raises(pc.ScheduleError, match="2 copies of each stage, is given together with memory_limit"):
        step_schedule(own, 4)
    assert 4 not in own.schedules


def test_a_plan_follows_a_schedule_whose_devices_share_the_memory_of_the_parameters() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    options = {
        "devices": ["cpu"] * 2,
        "n_microbatches": 4,
        "cost": "analytic",
        "loss_fn": lambda made: made.square().mean(),
    }
    pipe = pc.compile(model, 4, example_args=(torch.randn(8, 4),), schedule="interleaved", **options)
    assert pipe.plan.placement == pipe.schedule.placement == (0, 1, 0, 1)
    pipe.reschedule("zbv").step(torch.randn(8, 4))
    assert pipe.plan.placement == pipe.schedule.placement == pipe.program.placement == (0, 1, 1, 0)
    again = pc.compile(model, 4, example_args=(torch.randn(8, 4),), schedule="interleaved", plan=pipe.plan, **options)
    assert again.plan.placement == again.schedule.placement == (0, 1, 0, 1)


def test_a_call_runs_all_forwards_of_a_device_before_its_backwards() -> None:
    v = breadth_first((0, 1, 1, 0), 2, with_backward=True)
    assert [[str(action) for action in row] for row in v.rows] == [
        ["0F0", "0F1", "3F0", "3F1", "3B0", "3B1", "0B0", "0B1"],
        ["1F0", "1F1", "2F0", "2F1", "2B0", "2B1", "1B0", "1B1"],
    ]
    assert (v.name, v.placement, v.n_stages, v.n_microbatches) == ("gpipe", (0, 1, 1, 0), 4, 2)
    forward = breadth_first((0, 1), 2, with_backward=False)
    assert (forward.name, [[str(action) for action in row] for row in forward.rows]) == (
        "forward", [["0F0", "0F1"], ["1F0", "1F1"]]
    )  # fmt: skip
    pc.verify(v)


def test_a_plan_whose_operations_were_moved_by_hand_runs_with_a_warning() -> None:
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.randn(8, 4)
    plan = pc.compile(model, 2, example_args=(x,), cost="analytic", devices=["cpu"] * 2).plan
    name = next(name for name, stage in reversed(plan.stage_of.items()) if stage == 0)
    moved = replace(plan, stage_of={**plan.stage_of, name: 1})
    with pytest.warns(
        pc.PartitionWarning, match="stages 0, 1 of the plan have other operations than its figures are of"
    ):
        pipe = pc.compile(model, 2, example_args=(x,), plan=moved, devices=["cpu"] * 2)
    torch.testing.assert_close(pipe(x), model(x))
