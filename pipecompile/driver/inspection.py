"""Inspection of a compiled pipeline: the costs of its step, the dump of all levels, and the report.

These functions take an `Inspection`, a frozen view of the pipeline, so that they can be used and tested without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipecompile.costs.device_specs import Links
from pipecompile.errors import InputError
from pipecompile.graph.stages import routes
from pipecompile.ir import LOSS, Kind, Program, Route, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.timeline import Timeline
from pipecompile.ir.training_routes import training_routes
from pipecompile.ir.what_if import RouteCosts, WhatIf
from pipecompile.partitioners import Problem
from pipecompile.passes import lower
from pipecompile.passes.user_passes import UserPass
from pipecompile.planning.alternatives import what_if
from pipecompile.planning.schedule_choice import offload_seconds, sharding_bytes, simulation_costs
from pipecompile.show import StagePicture, dump, report_html, stage_picture, write_text
from pipecompile.show.html_report import ReportSetting
from pipecompile.show.memory_table import MemoryFigures
from pipecompile.simulation.advice import advise
from pipecompile.simulation.costs import CostOptions
from pipecompile.simulation.simulator import simulate
from pipecompile.text.input_checks import file_path
from pipecompile.text.progress import task
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Inspection"]

_ROUNDING = 1e-9
"""Relative difference of two sums of the same seconds."""

_WRITTEN = "the program is the one that was passed to compile: no pass has run, and the verifier has accepted it\n"

_UNSTEADY = "a pass made another program this time: program.txt has the one that runs\n"


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything about a compiled pipeline that can be looked at. `title` is the name of the model's class, `dispatch` that of the
    last step.

    `optimizer_state` is the number of tensors that the optimizer keeps per parameter, `memory_limit` bytes per device,
    `samples` the samples of the last step, None without a batch dimension. `is_one_graph`: the step is captured as one CUDA graph.
    """

    title: str
    plan: Plan
    problem: Problem | None
    graph: TracedGraph
    schedule: Schedule
    program: Program
    measured: Timeline | None
    links: Links
    is_overlapped: bool
    is_written: bool
    phases: str
    passes: tuple[UserPass, ...] = ()
    dispatch: str = ""
    optimizer_state: int = 0
    memory_limit: float | tuple[float, ...] | None = None
    samples: int | None = None
    is_one_graph: bool = False

    @property
    def costs(self) -> CostOptions:
        """The costs of the program under the plan, as `simulate` takes them."""
        costs = simulation_costs(self.plan.stages, self.program.routes, self.links, self.plan.placement)
        if any(action.kind is Kind.OFFLOAD for row in self.schedule.rows for action in row):
            costs["offload"] = offload_seconds(self.plan.stages, self.links)
        if any(action.kind is Kind.UNSHARD for row in self.schedule.rows for action in row):
            costs |= sharding_bytes(self.plan.stages)
        return CostOptions(**costs, streams=self.links.streams)

    def simulate(self) -> Timeline:
        """Return the predicted timeline of a step, in seconds, with the bound that a search of its schedule proved.

        A step that takes less than the bound has other costs than the search had: then it has no bound.
        """
        timeline = simulate(self.program, **self.costs)
        certificate = self.schedule.certificate
        if certificate is None or certificate.bound > timeline.makespan * (1 + _ROUNDING):
            return timeline
        return replace(timeline, bound=min(certificate.bound, timeline.makespan))

    def dump(self, directory: str | Path) -> list[Path]:
        """Write every level as a file and return the paths. Raises InputError if the directory cannot be written."""
        changes = [_WRITTEN] if self.is_written else []
        if not self.is_written:
            program = lower(
                self.schedule, self.program.routes, overlap=self.is_overlapped, dump=changes.append, passes=self.passes
            )
            changes += [_UNSTEADY] if self.passes and program != self.program else []
        with task("writing the dump"):
            return self._dump(directory, changes)

    def _dump(self, directory: str | Path, changes: list[str]) -> list[Path]:
        return dump(
            directory,
            plan=self.plan,
            graph=self.graph,
            schedule=self.schedule,
            program=self.program,
            predicted=self.simulate(),
            measured=self.measured,
            texts={"passes.txt": "\n".join(changes), "phases.txt": self.phases, "report.html": self.report()},
        )

    def write_report(self, path: str | Path) -> Path:
        """Write the report as one HTML page. Raises InputError if the file cannot be written."""
        target = file_path("path", path)
        with task("writing the report"):
            return write_text(target, self.report())

    def draw(self, path: str | Path | None = None) -> StagePicture:
        """Return the picture of stages and devices, and write its SVG to `path`. Raises InputError if the file cannot be written."""
        picture = stage_picture(self.plan)
        if path is not None:
            path = file_path("path", path)
            if path.suffix not in ("", ".svg"):
                raise InputError(f"path={str(path)!r}: the picture is SVG", hint=str(path.with_suffix(".svg")))
            write_text(path, str(picture))
        return picture

    def report(self) -> str:
        """Return the report: tables, timelines, advice, and what other machines and schedules would take."""
        from pipecompile.driver.run_environment import environment_facts, lines_again, throughput

        predicted = self.simulate()
        run = self.measured
        is_whole = run is not None and all(map(run.compute, self.plan.placement))  # not one rank's row alone
        step = run.makespan if run is not None and is_whole else 0.0
        return report_html(
            self.schedule,
            predicted,
            self.measured,
            plan=self.plan,
            graph=self.graph,
            advice=advise(self.program, **self.costs),
            what_if=self._what_if(),
            memory=self._memory(predicted),
            setting=ReportSetting(
                self.title,
                self.dispatch,
                tuple(throughput(self.samples, step)),
                tuple(environment_facts(self.plan.devices)),
                lines_again(self.plan.devices, self.schedule, has_run=run is not None),
            ),
        )

    def _what_if(self) -> WhatIf | None:
        """Return the alternatives to the plan, with what crosses between stages in the step that runs and in other cuts; None for a
        schedule with several copies of its stages, which the page cannot simulate.
        """
        if self.schedule.directions:
            return None

        def costs(crossing: Sequence[Route], placement: Sequence[int] | None, scale: float = 1.0) -> list[RouteCosts]:
            sized = [replace(route, nbytes=route.nbytes * scale) for route in crossing]
            seconds = self.links.seconds(sized, placement)
            return [RouteCosts(r.source, r.consumers, r.nbytes, r.gradient, seconds[r.value]) for r in sized]

        def of_cut(stage_of: Mapping[str, int], n_stages: int) -> list[RouteCosts]:
            crossing = routes(self.graph, stage_of)
            if not is_training:
                return costs(crossing, None, scale)
            return costs(training_routes(crossing, n_stages, with_target=True), None, scale)

        recorded = sum(route.nbytes for route in routes(self.graph, self.plan.stage_of))
        scale = sum(route.nbytes for route in self.plan.routes) / recorded if recorded else 1.0
        is_training = any(route.value == LOSS for route in self.program.routes)
        own = costs(self.program.routes, self.plan.placement)
        return what_if(self.plan, self.problem, self.schedule, own, of_cut, overlaps=self.is_overlapped)

    def _memory(self, predicted: Timeline) -> MemoryFigures:
        """Return the bytes of each device by kind at the peak of the predicted step, and the limits."""
        from pipecompile.driver.memory_by_kind import memory_by_kind, with_step_graph

        limit = self.memory_limit
        limits = () if limit is None else limit if isinstance(limit, tuple) else (limit,) * len(self.plan.devices)
        own = self.graph, self.plan, predicted.peak_memory, self.optimizer_state
        kinds = memory_by_kind(*own, self.program.directions)
        return MemoryFigures(with_step_graph(kinds, self.program) if self.is_one_graph else kinds, limits)
