"""The last two phases: a schedule lowered to a program, and the program bound to the stages. One per number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pipecompile.driver.specialization import Specialization
from pipecompile.errors import ScheduleError
from pipecompile.ir import Action, Kind, Program, Route, Schedule
from pipecompile.ir.training_routes import training_routes
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.passes import lower
from pipecompile.passes.checkpointing import Checkpoint
from pipecompile.passes.user_passes import UserPass
from pipecompile.planning.schedule_choice import make_schedule, sharding_bytes, simulation_costs
from pipecompile.runtime.cells.stage_cells import Cell, loss_cells, plain_cells
from pipecompile.runtime.cuda_graphs.stage_graphs import StageGraphs, with_cuda_graphs
from pipecompile.runtime.cuda_graphs.step_graphs import StepGraphs
from pipecompile.runtime.executable import Executable, ProgramBinding
from pipecompile.settings.direction_choice import check_directions
from pipecompile.simulation.simulator import simulate
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = [
    "breadth_first", "call_executable", "call_parts", "check_step", "forward_schedule", "lower_run", "lower_step", "step_executable", "step_parts",
    "step_schedule",
]  # fmt: skip


def step_executable(
    specialization: Specialization, n_microbatches: int, with_target: bool, *, kind: str = "step"
) -> Executable:
    """Return what runs a step: forward, loss and backward under the schedule; of kind "loss" the forward and the loss alone."""
    key = kind, n_microbatches, with_target
    if key not in specialization.executables:
        specialization.executables[key] = _new_step(specialization, n_microbatches, with_target, kind)
    return specialization.executables[key]


def call_executable(specialization: Specialization, n_microbatches: int, *, with_backward: bool) -> Executable:
    """Return what runs `pipe(x)`: the forward alone, or in GPipe order with a backward to come."""
    key = "call", n_microbatches, with_backward
    if key not in specialization.executables:
        specialization.executables[key] = _new_call(specialization, n_microbatches, with_backward)
    return specialization.executables[key]


def step_schedule(
    specialization: Specialization, n_microbatches: int, routes: Sequence[Route] | None = None
) -> Schedule:
    """Return the order of actions of a step, for values that move along `routes`, by default those of the specialization.

    A schedule may put stages on other pipeline devices than the plan, if these share the memory of the parameters: the plan follows it.
    Raises ScheduleError if they do not, and if the options exclude the schedule.
    """
    if routes is None and n_microbatches in specialization.schedules:
        return specialization.schedules[n_microbatches]
    plan, options, is_own = specialization.plan, specialization.options, routes is None
    routes = specialization.routes if routes is None else routes
    schedule = make_schedule(options, plan.stages, routes, plan.placement, n_microbatches, exact=True)
    if tuple(options.devices[device] for device in schedule.placement) != specialization.stage_devices:
        raise ScheduleError(
            f"schedule {shown(schedule.name)} puts stages on devices {schedule.placement}",
            why=f"the plan has them on {plan.placement}, and their parameters are there",
            hint="compile with this schedule, without the plan",
        )
    check_directions(schedule, options)  # of other numbers of micro-batches, it may have more copies of the stages
    if is_own:
        if schedule.placement != plan.placement:
            specialization.plan = replace(plan, placement=schedule.placement)
        specialization.schedules[n_microbatches] = schedule
    return schedule


def forward_schedule(specialization: Specialization, n_microbatches: int) -> Schedule:
    """Return the order of a step without a backward, stages on the devices of the plan."""
    return breadth_first(specialization.plan.placement, n_microbatches, with_backward=False)


def breadth_first(placement: Sequence[int], n_microbatches: int, *, with_backward: bool) -> Schedule:
    """Return the order of `pipe(x)`: per device all forwards, stage by stage, then all backwards from the last stage down."""
    rows = []
    for device in range(max(placement) + 1):
        stages = [stage for stage, home in enumerate(placement) if home == device]
        forwards = [Action(stage, Kind.FORWARD, m) for stage in stages for m in range(n_microbatches)]
        backwards = [Action(stage, Kind.BACKWARD, m) for stage in reversed(stages) for m in range(n_microbatches)]
        rows.append((*forwards, *(backwards if with_backward else ())))
    name = "gpipe" if with_backward else "forward"
    return Schedule(len(placement), n_microbatches, tuple(placement), tuple(rows), name)


def _new_step(specialization: Specialization, n_microbatches: int, with_target: bool, kind: str) -> Executable:
    routes, cells = step_parts(specialization, with_target)
    log, is_step = specialization.log, kind == "step"
    schedule = (step_schedule if is_step else forward_schedule)(specialization, n_microbatches)
    lowered = lower_step if is_step else lower_run
    program = log.run("lower", lowered, specialization, schedule, routes, describe=_instructions)
    return log.run("bind", _bind, specialization, program, cells)


def step_parts(specialization: Specialization, with_target: bool) -> tuple[tuple[Route, ...], Sequence[Cell]]:
    """Return the routes of a step and the cells of its stages."""
    options, stages = specialization.options, specialization.stages
    routes = training_routes(specialization.routes, len(stages), with_target, options.has_aux)
    cells = loss_cells(stages, specialization.codes, routes, specialization.outputs, options.loss_fn)
    states = specialization.states
    if states:
        cells = [replace(cell, slices=state) for cell, state in zip(cells, states, strict=True)]
    return routes, _graphed(specialization, cells)


def _new_call(specialization: Specialization, n_microbatches: int, with_backward: bool) -> Executable:
    options, log = specialization.options, specialization.log
    order = breadth_first(specialization.plan.placement, n_microbatches, with_backward=with_backward)
    checkpoint = options.checkpoint if with_backward else "never"
    routes, cells = call_parts(specialization, with_backward)
    program = log.run("lower", lower_run, specialization, order, routes, checkpoint, describe=_instructions)
    return log.run("bind", _bind, specialization, program, cells)


def call_parts(specialization: Specialization, with_backward: bool) -> tuple[tuple[Route, ...], Sequence[Cell]]:
    """Return the routes of `pipe(x)` and the cells of its stages."""
    cells = plain_cells(specialization.stages, specialization.codes)
    # with a backward to come, `pipe(x)` may be called again before: a captured graph would overwrite its own results
    return specialization.routes, cells if with_backward else _graphed(specialization, cells)


def lower_step(specialization: Specialization, schedule: Schedule, routes: Sequence[Route]) -> Program:
    """Return the program of a step: that of the user, or what the schedule is lowered to, with the passes of the user."""
    if isinstance(specialization.options.schedule, WrittenProgram):
        from pipecompile.driver.written_steps import fitted

        return fitted(specialization.options.schedule, specialization, routes)
    return lower_run(specialization, schedule, routes, passes=specialization.options.passes)


def check_step(specialization: Specialization, n_microbatches: int) -> None:
    """Lower the program of a step if it, a pass or the plan is the user's: their faults show then.

    If the program is the user's, whether there is a target is read from it.
    """
    options = specialization.options
    if not (isinstance(options.schedule, WrittenProgram) or options.passes or options.plan):
        return
    routes = training_routes(specialization.routes, len(specialization.stages), options.has_target, options.has_aux)
    lower_step(specialization, step_schedule(specialization, n_microbatches), routes)


def lower_run(
    specialization: Specialization,
    schedule: Schedule,
    routes: Sequence[Route],
    checkpoint: Checkpoint = "never",
    passes: Sequence[UserPass] = (),
) -> Program:
    """Return what a schedule is lowered to, with the recomputations of `checkpoint` beside those that the schedule has."""
    overlap, sums = specialization.is_overlapped, specialization.options.gradient_sums
    return lower(schedule, routes, checkpoint=checkpoint, overlap=overlap, sums=sums, passes=passes)


def _graphed(specialization: Specialization, cells: Sequence[Cell]) -> Sequence[Cell]:
    """Return the cells as CUDA graphs if the options ask for graphs."""
    if not specialization.options.cuda_graphs:
        return cells
    return with_cuda_graphs(cells, specialization.stages, specialization.stage_devices)


def _bind(specialization: Specialization, program: Program, cells: Sequence[Cell]) -> Executable:
    devices, norms = specialization.options.devices, specialization.norms
    mirrors, peaks = specialization.mirrors, partial(_predicted_peaks, specialization, program)
    is_graphed = any(isinstance(cell.code, StageGraphs) for cell in cells)
    is_one = specialization.options.cuda_graphs == "step" and is_graphed
    binding = ProgramBinding(
        program, cells, devices, specialization.graph, mirrors, norms, peaks, specialization.options.partitions,
        StepGraphs(program, cells, devices, peaks) if is_one else None,
    )  # fmt: skip
    return specialization.executable(binding)


def _predicted_peaks(specialization: Specialization, program: Program) -> Sequence[float]:
    """Return the predicted peak of each pipeline device, in bytes: parameters, gradients and optimizer state, and a step's activations."""
    plan, links = specialization.plan, specialization.options.links
    costs = simulation_costs(plan.stages, program.routes, links, plan.placement)
    costs["parameter_bytes"] = [stage.state_bytes for stage in plan.stages]
    if specialization.options.reshard_after_forward:
        costs |= sharding_bytes(plan.stages)
    return simulate(program, **costs).peak_memory


def _instructions(program: Program) -> str:
    return f"{counted(sum(map(len, program.rows)), 'instruction')}, {counted(program.n_microbatches, 'micro-batch')}"
