"""The result of a command, for programs (one dict) and for people (tables and text)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.console import RenderableType
from rich.table import Table

from pipecompile.ir import Schedule
from pipecompile.ir.slices import title_of
from pipecompile.ir.timeline import Timeline
from pipecompile.show.dump import dump
from pipecompile.show.grid import timeline_grid
from pipecompile.show.html_report import report_html
from pipecompile.show.table import StageTable, considered_table, remarks, step_gap
from pipecompile.text.units import BYTES, SECONDS, written

if TYPE_CHECKING:
    from pipecompile.cli.training_trial import Trial
    from pipecompile.graph.explanation import Explanation
    from pipecompile.ir.plan import Plan
    from pipecompile.pipeline import Pipeline

__all__ = ["CommandReport", "check_report", "plan_report", "run_report", "schedule_report", "simulate_report"]


@dataclass(frozen=True, slots=True)
class CommandReport:
    """The JSON object and the printed blocks of one command, with its exit code."""

    data: dict[str, Any]
    blocks: tuple[RenderableType, ...]
    exit_code: int = 0


def check_report(explanation: Explanation) -> CommandReport:
    """Report an explanation. The exit code is 3 for a model that cannot be recorded, 2 for wrong inputs."""
    code = 0 if explanation.traced else 2 if any(failure.code == "PC109" for failure in explanation.failures) else 3
    return CommandReport(explanation.to_dict(), (str(explanation),), code)


def plan_report(pipe: Pipeline, out: Path | None) -> CommandReport:
    """Report the plan and its table, and the candidates if the number of micro-batches or the schedule was chosen."""
    predicted = pipe.simulate()
    files = _files(pipe, out)
    data = {"plan": msgspec.to_builtins(pipe.plan), "bubble": predicted.bubble, "files": files} | _cut(pipe.plan)
    candidates = () if pipe.plan.considered is None else (considered_table(pipe.plan.considered),)
    return CommandReport(data, (StageTable(pipe.plan, predicted), *candidates, *_written_files(files)))


def simulate_report(pipe: Pipeline, unit: Timeline, out: Path | None) -> CommandReport:
    """Report the predicted timeline. `unit` is the timeline of the same schedule in unit time, which is drawn."""
    timeline, schedule = pipe.simulate(), pipe.schedule
    files = _files(pipe, out)
    data = _figures(timeline) | _cut(pipe.plan) | {
        "schedule": schedule.name, "n_stages": schedule.n_stages, "n_microbatches": schedule.n_microbatches,
        "unit_time": _figures(unit), "csv": schedule.to_csv(), "files": files,
    }  # fmt: skip
    summary = (
        f"{title_of(schedule)}: makespan {written(SECONDS, timeline.makespan)}, bubble {timeline.bubble:.1%}, "
        f"longest device {written(SECONDS, timeline.span)}"
    )
    summary = "\n".join([summary, *filter(None, [step_gap(timeline)]), *remarks(pipe.plan)])
    grid = f"In unit time (F = 1, B = 2; makespan {unit.makespan:g}, bubble {unit.bubble:.1%}):\n"
    return CommandReport(
        data,
        (
            summary,
            _device_table(timeline, pipe.plan.devices),
            grid + timeline_grid(unit).rstrip(),
            *_written_files(files),
        ),
    )


def schedule_report(schedule: Schedule, timeline: Timeline, out: Path | None) -> CommandReport:
    """Report a schedule without a model, in unit time."""
    paths = []
    if out is not None:
        from pipecompile.planning.alternatives import unit_what_if

        is_plain = schedule.n_slices == 1 and not schedule.directions
        alternatives = unit_what_if(schedule) if is_plain else None
        page = report_html(schedule, timeline, what_if=alternatives, seconds=False)
        paths = dump(out, schedule=schedule, predicted=timeline, texts={"report.html": page}, seconds=False)
    files = [str(path) for path in paths]
    data = _figures(timeline) | {
        "schedule": schedule.name, "n_stages": schedule.n_stages, "n_microbatches": schedule.n_microbatches,
        **({} if schedule.n_slices == 1 else {"n_slices": schedule.n_slices}),
        "placement": list(schedule.placement), "csv": schedule.to_csv(), "files": files,
    }  # fmt: skip
    grid = timeline_grid(timeline, tick=1 / schedule.n_slices).rstrip()
    return CommandReport(
        data, (_unit_summary(schedule, timeline), grid, schedule.to_csv().rstrip(), *_written_files(files))
    )


def _unit_summary(schedule: Schedule, timeline: Timeline) -> str:
    """Return two lines, with what the search proved one more, on a schedule in unit time."""
    peaks = " ".join(f"{peak:g}" for peak in timeline.peak_in_flight)
    noun = "micro-batches" if schedule.n_slices == 1 else "slices"
    return (
        f"{title_of(schedule)}: makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}, span {timeline.span:g}"
        f" (F = 1, B = 2)\n{_certificate(schedule)}most {noun} in flight per device: {peaks}"
    )


def run_report(pipe: Pipeline, trial: Trial, out: Path | None) -> CommandReport:
    """Report losses, and the largest differences of losses and gradients from a loop without a pipeline."""
    files = _files(pipe, out)
    data = msgspec.to_builtins(trial) | {"loss_difference": trial.loss_difference, "files": files} | _cut(pipe.plan)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    compared = bool(trial.eager_losses)
    for header in ("step", "loss", "time", *(("eager loss", "eager time") if compared else ())):
        table.add_column(header, justify="right")
    for step, (loss, seconds) in enumerate(zip(trial.losses, trial.seconds, strict=True)):
        eager = (f"{trial.eager_losses[step]:.7g}", written(SECONDS, trial.eager_seconds[step])) if compared else ()
        table.add_row(str(step), f"{loss:.7g}", written(SECONDS, seconds), *eager)
    return CommandReport(
        data,
        (
            "\n".join([title_of(pipe.schedule), *remarks(pipe.plan)]),
            table,
            *((_comparison(trial),) if compared else ()),
            *_written_files(files),
        ),
    )


def _comparison(trial: Trial) -> str:
    gaps = f"loss {trial.loss_difference:.2g}, gradient {trial.gradient_difference:.2g}"
    lines = [f"largest difference to eager micro-batches: {gaps} (largest gradient {trial.largest_gradient:.2g})"]
    if trial.random:
        lines.append("The model draws random numbers (dropout): pipeline and eager need not agree.")
    if len(trial.seconds) > 1:
        ours, theirs = median(trial.seconds[1:]), median(trial.eager_seconds[1:])
        lines.append(f"a step takes {written(SECONDS, ours)}, eager {written(SECONDS, theirs)} ({theirs / ours:.2f}x)")
    return "\n".join(lines)


def _cut(plan: Plan) -> dict[str, Any]:
    """Return the gap of the cut, bytes per stage, and the constraints on the cut with their price."""
    return {
        "gap": plan.gap, "price": plan.price, "held": [stage.memory for stage in plan.stages],
        "forced": [list(stage.forced) for stage in plan.stages], "recompute": list(plan.recompute),
        "step": plan.step and plan.step.seconds, "no_step_below": plan.step and plan.step.lower_bound,
    }  # fmt: skip


def _figures(timeline: Timeline) -> dict[str, Any]:
    return {
        "makespan": timeline.makespan, "span": timeline.span, "bubble": timeline.bubble,
        "peak_memory": list(timeline.peak_memory), "peak_in_flight": list(timeline.peak_in_flight),
        "step_bound": timeline.bound, "step_gap": timeline.gap,
    }  # fmt: skip


def _certificate(schedule: Schedule) -> str:
    """Return a line with what the search proved; an empty text for a schedule that was not searched."""
    return "" if schedule.certificate is None else f"{schedule.certificate}\n"


def _device_table(timeline: Timeline, devices: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("device")
    for header in ("busy", "peak activations", "in flight"):
        table.add_column(header, justify="right")
    for device in range(timeline.n_devices):
        busy = sum(s.end - s.start for s in timeline.compute(device)) / (timeline.makespan or 1.0)
        peak = written(BYTES, timeline.peak_memory[device]) if timeline.memory else ""
        in_flight = f"{timeline.peak_in_flight[device]:g}" if timeline.peak_in_flight else ""
        table.add_row(f"{device} · {devices[device]}", f"{busy:.0%}", peak, in_flight)
    return table


def _files(pipe: Pipeline, out: Path | None) -> list[str]:
    return [] if out is None else [str(path) for path in pipe.dump(out)]


def _written_files(files: Sequence[str]) -> tuple[str, ...]:
    return ("wrote " + " ".join(files),) if files else ()
