"""Programs for a list of micro-batches: that of their recording, or if there are several recordings, one program for all.

micro-batches     (3, 17)   (2, 40)   (3, 17)
recordings           1         2         1         both with the same cut
program           one, with the routes of both; each cell runs the stage of its micro-batch's recording
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipecompile.driver.compile_context import CompileContext
from pipecompile.driver.programs import (
    breadth_first,
    call_executable,
    call_parts,
    forward_schedule,
    lower_run,
    lower_step,
    step_executable,
    step_parts,
    step_schedule,
)
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import PlanError
from pipecompile.ir import Program, Route, Schedule
from pipecompile.ir.routes import union_routes
from pipecompile.ir.training_routes import training_routes
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.runtime.cells.deferred_batchnorm import joined_norms
from pipecompile.runtime.cells.stage_cells import Cell, plain_cells
from pipecompile.runtime.cells.variant_cells import VariantCell, with_ports
from pipecompile.runtime.executable import Executable, ProgramBinding

__all__ = ["ListedProgram", "ListedPrograms"]

_KEPT = 8
"""Programs that are kept, of one number of micro-batches and one set of routes each. Recordings of other lengths mostly share one."""


@dataclass(frozen=True, slots=True)
class ListedProgram:
    """An executable for a list of micro-batches. `names` maps, for each recording by number, its values to those of the program."""

    executable: Executable
    recordings: tuple[int, ...]
    names: Mapping[int, Mapping[str, str]]

    def name(self, number: int, value: str) -> str:
        """Return the name in the program of a value of a recording."""
        return self.names.get(number, {}).get(value, value)


@dataclass(frozen=True, slots=True)
class _Form:
    """A kind of run: `parts` returns the routes and cells of a recording, `widened` adds to united routes what a run needs."""

    key: tuple[Any, ...]
    parts: Callable[[Specialization], tuple[tuple[Route, ...], Sequence[Cell]]]
    widened: Callable[[Specialization, Sequence[Route]], tuple[Route, ...]]
    schedule: Callable[[Specialization, Sequence[Route]], Schedule]
    lower: Callable[[Specialization, Schedule, Sequence[Route]], Program]


@dataclass(frozen=True, slots=True)
class ListedPrograms:
    """The programs of one pipeline for lists of micro-batches of several recordings, least recently used first."""

    context: CompileContext
    _kept: OrderedDict[tuple[Any, ...], _Bound] = field(default_factory=OrderedDict)

    def clear(self) -> None:
        """Drop all programs."""
        self._kept.clear()

    def step(self, recordings: Sequence[Specialization], *, with_target: bool, kind: str) -> ListedProgram:
        """Return what runs a step on a micro-batch of each of these recordings, in order; of kind "loss" without backward."""
        count, first = len(recordings), recordings[0]
        if all(one is first for one in recordings):
            return self._plain(recordings, step_executable(first, count, with_target, kind=kind))
        form = _Form(
            (kind, count, with_target),
            lambda one: step_parts(one, with_target),
            lambda one, routes: training_routes(routes, len(one.stages), with_target, one.options.has_aux),
            lambda one, routes: step_schedule(one, count, routes) if kind == "step" else forward_schedule(one, count),
            lower_step if kind == "step" else lower_run,
        )
        return self._mixed(recordings, form)

    def call(self, recordings: Sequence[Specialization], *, with_backward: bool) -> ListedProgram:
        """Return what runs a call on a micro-batch of each of these recordings, in order."""
        count, first = len(recordings), recordings[0]
        if all(one is first for one in recordings):
            return self._plain(recordings, call_executable(first, count, with_backward=with_backward))
        form = _Form(
            ("call", count, with_backward),
            lambda one: call_parts(one, with_backward),
            lambda _, routes: tuple(routes),
            lambda one, _: breadth_first(one.plan.placement, count, with_backward=with_backward),
            lambda one, order, routes: lower_run(
                one, order, routes, one.options.checkpoint if with_backward else "never"
            ),
        )
        return self._mixed(recordings, form)

    @staticmethod
    def _plain(recordings: Sequence[Specialization], executable: Executable) -> ListedProgram:
        return ListedProgram(executable, tuple(one.number for one in recordings), {})

    def _mixed(self, recordings: Sequence[Specialization], form: _Form) -> ListedProgram:
        variants = {one.number: one for one in sorted(recordings, key=lambda one: one.number)}
        _check_placement([*variants.values()])
        united, names = union_routes({number: one.routes for number, one in variants.items()})
        routes = form.widened(recordings[0], united)
        names = {number: {**{route.value: route.value for route in routes}, **own} for number, own in names.items()}
        parameters = tuple(cell.parameters for cell in plain_cells(recordings[0].stages, recordings[0].codes))
        key = (*form.key, parameters, *(replace(route, nbytes=0.0) for route in routes))
        bound = self._kept.setdefault(key, _Bound(form, routes))
        self._kept.move_to_end(key)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        executable = bound.serving(variants, names, self.context)
        return ListedProgram(executable, tuple(one.number for one in recordings), names)


@dataclass(slots=True)
class _Bound:
    """A program with these routes, bound to the cells of the recordings that it has served, by number."""

    form: _Form
    routes: tuple[Route, ...]
    members: dict[int, Specialization] = field(default_factory=dict)
    cells: list[VariantCell] = field(default_factory=list)
    executable: Executable | None = None

    def serving(
        self, variants: Mapping[int, Specialization], names: Mapping[int, Mapping[str, str]], context: CompileContext
    ) -> Executable:
        """Return the executable, bound to these recordings too."""
        if added := [one for number, one in variants.items() if number not in self.members]:
            for one in added:
                self._add(one, names[one.number])
            self._bind(context)
        for cell in self.cells:
            cell.selected = frozenset(variants)
        assert self.executable is not None
        return self.executable

    def _add(self, one: Specialization, names: Mapping[str, str]) -> None:
        parts = [with_ports(cell, s, self.routes, names) for s, cell in enumerate(self.form.parts(one)[1])]
        self.cells = self.cells or [VariantCell({one.number: cell}, {}) for cell in parts]
        for cell, part in zip(self.cells, parts, strict=True):
            cell.variants[one.number], cell.graphs[one.number] = part, one.graph
        self.members[one.number] = one

    def _bind(self, context: CompileContext) -> None:
        """Lower the program if that has not been done, and join mirrors and deferred layers of all recordings."""
        first, *others = self.members.values()
        mirrors = first.mirrors.joined_with([one.mirrors for one in others])
        _check_written(mirrors, self.cells)
        norms = context.backend.deferred_norms(joined_norms([one.norms for one in self.members.values()]))
        if self.executable is not None:
            self.executable.mirrors, self.executable.norms = mirrors, norms
            return
        program = self.form.lower(first, self.form.schedule(first, self.routes), self.routes)
        devices, parts = first.options.devices, first.options.partitions
        binding = ProgramBinding(program, self.cells, devices, first.graph, mirrors, norms, partitions=parts)
        self.executable = context.backend.executable(mirrors)(binding)


def _check_placement(recordings: Sequence[Specialization]) -> None:
    """Raise PlanError if recordings have their stages on different devices: a graph that hardly does the same has a cut of its own."""
    places = {tuple(one.plan.placement) for one in recordings}
    if len(places) > 1:
        raise PlanError(
            "micro-batches of one list are cut differently",
            why=f"their recordings put stages on devices {' and '.join(map(str, sorted(places)))}",
            hint="a list for each kind of micro-batch",
        )


def _check_written(mirrors: Mirrors, cells: Sequence[VariantCell]) -> None:
    """Raise PlanError for a tensor that one recording writes and another has a copy of."""
    effects = [cell.effects for stage in cells for cell in stage.variants.values()]
    written = {id(tensor) for one in effects for tensor in one.written_buffers}
    if any({id(mirror.home), id(mirror.copy)} & written for mirror in mirrors.mirrors):
        raise PlanError(
            "micro-batches of one list write a tensor that has copies on several devices",
            why="each recording has a copy of its own, which would miss what the others write",
            hint="a list for each kind of micro-batch",
        )
