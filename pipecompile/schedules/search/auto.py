"""`auto_schedule`: search for the fastest schedule under given costs and memory.

    catalogue, also with fewer micro-batches in flight ───┐
                                                          ├─▶ fits the memory ─▶ fastest (simulated) ─▶ swaps on its
    priority rules, placements, recomputed stages ────────┤                                             critical path
    modulo schedules, if memory is limited ───────────────┘                                                  │
    certificate: makespan, lower bound, gap  ◀── CP-SAT around it, if OR-Tools is installed (`exact.py`) ◀───┘

The result is never slower than the fastest schedule of the catalogue that fits. Its certificate has a lower bound on all schedules:
that of `makespan_bound.py`, raised by CP-SAT. Rules and CP-SAT do not know of launches and shared streams; all
choices are by the full simulation. List schedules bound what stages save; if the buffers of values do not fit beside that,
`list_search.py` reduces the capacity and schedules again. The search is deterministic, unless `time_limit` or Ctrl-C ends it, or
CP-SAT stands still (`exact_solver.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Unpack

from pipecompile.errors import InputError
from pipecompile.ir import Kind, Route, Schedule
from pipecompile.ir.certificate import Certificate
from pipecompile.ir.gc_pause import without_collection
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.schedules.building_blocks import check_cells, serial
from pipecompile.schedules.search.capped_depths import capped_candidates
from pipecompile.schedules.search.catalogue_candidates import catalogue_candidates
from pipecompile.schedules.search.critical_swaps import improve
from pipecompile.schedules.search.deadline import Deadline
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.exact import ExactProblem, cp_sat, solve_exactly
from pipecompile.schedules.search.list_search import EvaluatedSchedule, ListSearch, lightest
from pipecompile.schedules.search.makespan_bound import host_lower_bound, makespan_lower_bound
from pipecompile.schedules.search.memory_error import memory_error
from pipecompile.schedules.search.modulo_candidates import modulo_candidates
from pipecompile.schedules.search.recompute_choices import recompute_flag_sets
from pipecompile.schedules.search.search_arguments import PerDevice, memory_bound, placements_to_try
from pipecompile.schedules.search.workload import Workload
from pipecompile.simulation.costs import CostOptions, Costs, cost_fingerprint, make_costs
from pipecompile.text.input_checks import amount, whole
from pipecompile.text.progress import task
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted
from pipecompile.verifiers.routes import checked_routes

__all__ = ["auto_schedule"]

_LIST_ACTIONS = 600_000
"""Actions scheduled by list scheduling at effort 1: some seconds for 16 devices and 64 micro-batches."""

_MODULO_ACTIONS = 600_000
"""Actions placed by the search over modulo schedules at effort 1: a second."""

_SWAP_ACTIONS = 300_000
"""Actions simulated by the swaps of the tabu search at effort 1."""

_EXACT_SECONDS = 4.0
"""CP-SAT's deterministic time at effort 1, for all placements with an open gap together: mostly 3 to 15 seconds of the processor. Small problems get more."""

_NEGLIGIBLE = 1e-9
"""Relative tolerance for comparing seconds."""

_LIST_STEPS = 5
"""Steps like the evaluation of one schedule that the first two rules of a list search take."""

_SHARES = (0.4, 0.2, 0.4)
"""Shares of `_LIST_ACTIONS`: rules for every search, rules for the best three, hill climbing for the best two."""


@without_collection
def auto_schedule(
    n_stages: int,
    n_microbatches: int,
    *,
    n_devices: int | None = None,
    placement: Sequence[int] | None = None,
    routes: Sequence[Route] | None = None,
    memory_limit: PerDevice | None = None,
    in_flight: PerDevice | None = None,
    checkpoint: str | Sequence[bool] = "never",
    split: bool = True,
    effort: float = 1.0,
    time_limit: float = inf,
    exact: bool = True,
    **costs: Unpack[CostOptions],
) -> Schedule:
    """Return a schedule with the shortest simulated step that the search finds, never longer than the catalogue's best that fits.

    `placement` has the device of each stage; by default a loop, or to and fro (a V with two stages per device) if every device has
    equally many, whichever is faster: these are the placements of the catalogue. Values move along `routes`, by default a chain.
    `memory_limit` (bytes, as `simulate` counts them) or `in_flight` (micro-batches) bounds every device: one number, or one per
    device. `checkpoint` chooses the recomputed stages: "never", "always", a flag per stage, or "auto", which recomputes where
    memory requires it. `split=False` keeps backwards whole. `effort` multiplies the time of the search, in units of some seconds
    for 16 devices and 64 micro-batches. `time_limit` or Ctrl-C ends the search, the former after its seconds, with the best
    schedule so far. `costs` are those of `simulate`. Actions never overlap, and nothing is offloaded: schedules of the catalogue
    that do so are not compared.

    The schedule has a `certificate`: the makespan that `simulate` has under these costs, a lower bound in seconds on all such
    schedules on these placements within the memory, and its `gap`. If OR-Tools is installed (the extra `exact`), CP-SAT raises the
    bound and improves the schedule, unless `exact=False`.

    Raises ScheduleError with the needed memory if no schedule fits, and InputError for invalid arguments.
    """
    n_stages, n_microbatches = whole("n_stages", n_stages), whole("n_microbatches", n_microbatches)
    check_cells(n_stages, n_microbatches)
    routes = checked_routes(routes, n_stages)
    placements = placements_to_try(n_stages, n_devices, placement)
    devices = max(map(max, placements)) + 1
    checked = make_costs(n_stages, devices, routes, **costs)
    limit = memory_bound(memory_limit, in_flight, devices)
    effort, deadline = amount("effort", effort), Deadline(amount("time_limit", time_limit, finite=False))
    for name, flag in (("split", split), ("exact", exact)):
        if not isinstance(flag, bool):
            raise InputError(f"{name}={shown(flag)} is not True or False", hint=f"{name}=False")
    search = _AutoSearch(n_microbatches, routes, checked, limit, checkpoint, split, exact, effort, deadline)
    with task(search.line):
        return search.run(placements)


@dataclass(frozen=True, slots=True)
class _AutoSearch:
    """The arguments of `auto_schedule`, checked, and the steps of the search."""

    n_microbatches: int
    routes: tuple[Route, ...]
    costs: Costs
    limit: MemoryLimit | None
    checkpoint: str | Sequence[bool]
    split: bool
    exact: bool
    effort: float
    deadline: Deadline
    fitting: list[EvaluatedSchedule] = field(default_factory=list)

    def line(self) -> str:
        """Return the progress of the search as a text."""
        best = f", best of {len(self.fitting)}: {lightest(self.fitting).seconds:.6g}" if self.fitting else ""
        return f"searching a schedule for {counted(self.n_microbatches, 'micro-batch')}{best}"

    def run(self, placements: Sequence[tuple[int, ...]]) -> Schedule:
        """Return the fastest schedule that fits, improved by swaps. Raises ScheduleError if no schedule fits.

        Ctrl-C ends the search with the best schedule so far; without one it raises KeyboardInterrupt.
        """
        evaluators = [Evaluator(place, self.routes, self.costs, self.limit) for place in placements]
        with self.deadline.moved_by_interrupt():
            self._gather(evaluators)
        if not self.fitting:
            if self.deadline.is_interrupted:
                raise KeyboardInterrupt
            alone = serial(evaluators[0].placement, self.n_microbatches)
            candidates = [insert_recompute(alone, flags) for flags in self._flag_sets(evaluators[0])]
            raise memory_error(evaluators[0], candidates, hint_recompute=self.checkpoint == "never")
        best = lightest(self.fitting)
        if self.deadline.allows(0.9, 2) and (better := self._improved(best)) is not best.schedule:
            improved = EvaluatedSchedule(best.evaluator.seconds(better), better, best.evaluator)
            best = min(improved, best, key=lambda each: each.seconds)
        return self._certified(best, evaluators)

    def _gather(self, evaluators: Sequence[Evaluator]) -> None:
        """Append schedules that fit to `fitting`: the catalogue's, searched ones, and one micro-batch after another."""
        fitting = self.fitting
        self._add_catalogue({evaluator.placement: evaluator for evaluator in evaluators})
        if not fitting or self.deadline.allows(0.8, _LIST_STEPS * len(evaluators)):
            self._search_lists(evaluators)
        for evaluator in evaluators:
            if not fitting or self.deadline.allows(0.8):
                fitting += self._fitting(serial(evaluator.placement, self.n_microbatches), evaluator)

    def _certified(self, best: EvaluatedSchedule, evaluators: Sequence[Evaluator]) -> Schedule:
        """Return the schedule with its certificate, after the exact back end has improved both; without one if Ctrl-C ends the bound."""
        bounds: list[float] = []
        with self.deadline.moved_by_interrupt():
            ordered = sorted(evaluators, key=lambda each: each is not best.evaluator)
            closed = [self._closed_bound(evaluator) for evaluator in ordered]
            n_open = sum(bound < best.seconds * (1 - _NEGLIGIBLE) for bound in closed)
            for evaluator, bound in zip(ordered, closed, strict=True):
                better, proven = self._bounded(best, evaluator, bound, self.effort * _EXACT_SECONDS / max(1, n_open))
                best = better or best
                bounds.append(proven)
        if len(bounds) < len(evaluators):
            return replace(best.schedule, name="auto", certificate=None)
        costs = cost_fingerprint(self.costs, self.routes)
        certificate = Certificate(best.seconds, min(best.seconds, *bounds), self.exact and cp_sat() is not None, costs)
        return replace(best.schedule, name="auto", certificate=certificate)

    def _closed_bound(self, evaluator: Evaluator) -> float:
        """Return the lower bound in seconds on the placement of the evaluator that takes no search."""
        workload, recompute = self._workload(evaluator), self.checkpoint == "auto"
        return max(
            makespan_lower_bound(workload, self.n_microbatches, evaluator.capacity, recompute=recompute),
            host_lower_bound(workload, self.n_microbatches, self.costs, recompute=recompute),
        )

    def _bounded(
        self, best: EvaluatedSchedule, evaluator: Evaluator, bound: float, seconds: float
    ) -> tuple[EvaluatedSchedule | None, float]:
        """Return a shorter schedule, None if none is found, and a lower bound in seconds, at least `bound`, both for the placement of the
        evaluator.
        """
        if not self.exact or bound >= best.seconds * (1 - _NEGLIGIBLE):
            return None, bound
        workload = self._workload(evaluator)
        problem = ExactProblem(evaluator, workload, self.n_microbatches, self.checkpoint == "auto")
        incumbent = best.schedule if evaluator is best.evaluator else None
        limits = seconds, self.deadline.left
        result = solve_exactly(problem, incumbent, shorter_than=best.seconds, bound=bound, seconds=limits)
        if result.is_interrupted:
            self.deadline.interrupt()
        return result.schedule, result.bound

    def _workload(self, evaluator: Evaluator) -> Workload:
        """Return the workload with the stages that `checkpoint` recomputes; with "auto", none."""
        flags = next(self._flag_sets(evaluator))
        return evaluator.workload(flags, split=self.split)

    def _search_lists(self, evaluators: Sequence[Evaluator]) -> None:
        """Append the best of a list search per placement and set of recomputed stages, also of a search that Ctrl-C ends."""
        searches = [
            ListSearch(evaluator, evaluator.workload(flags, split=self.split), self.n_microbatches)
            for evaluator in evaluators
            for flags in self._flag_sets(evaluator)
        ]
        try:
            self._run(searches)
            if self.limit is not None and self.n_microbatches > 1:
                budget, recompute = self.effort * _MODULO_ACTIONS, self.checkpoint == "auto"
                goes_on = partial(self.deadline.allows, 0.8)
                self.fitting.extend(modulo_candidates(searches, budget, goes_on, recompute=recompute))
        finally:
            self.fitting.extend(search.best for search in searches if search.best)

    def _run(self, searches: list[ListSearch]) -> None:
        """Run the searches with the budget shared by `_SHARES`."""
        counts, methods = (len(searches), 3, 2), (ListSearch.try_rules, ListSearch.try_rules, ListSearch.climb)
        for share, count, method in zip(_SHARES, counts, methods, strict=True):
            searches.sort(key=lambda search: search.seconds)
            for search in searches[:count]:
                is_needed = not self.fitting and all(each.best is None for each in searches)
                if is_needed or self.deadline.allows(0.8, _LIST_STEPS):
                    method(search, share * self.effort * _LIST_ACTIONS / count)

    def _add_catalogue(self, evaluators: Mapping[tuple[int, ...], Evaluator]) -> None:
        """Append the catalogue's schedules that fit, and capped ones, until the time is over. `evaluators` has those of all placements."""
        place, fitting = next(iter(evaluators)), self.fitting
        counts, too_large = (len(place), self.n_microbatches, max(place) + 1), dict[tuple[int, ...], list[Schedule]]()
        for schedule in catalogue_candidates(*counts, self.routes, split=self.split):
            if (evaluator := evaluators.get(schedule.placement)) is None:
                continue
            fitting += (found := list(self._fitting(schedule, evaluator)))
            if not found:
                too_large.setdefault(schedule.placement, []).append(schedule)
            self.deadline.note()
            if not self.deadline.allows(0.6 if fitting else 0.3):
                break
        for place, own in too_large.items() if self.deadline.allows(0.6) else ():
            fitting += capped_candidates(evaluators[place], own, self._flag_sets(evaluators[place]))

    def _fitting(self, schedule: Schedule, evaluator: Evaluator) -> Iterator[EvaluatedSchedule]:
        """Yield the schedule with the first set of recomputed stages that makes it fit, if there is one."""
        candidates = (insert_recompute(schedule, flags) for flags in self._flag_sets(evaluator))
        fitting = next((candidate for candidate in candidates if not any(evaluator.excess(candidate))), None)
        if fitting is not None:
            yield EvaluatedSchedule(evaluator.seconds(fitting), fitting, evaluator)

    def _flag_sets(self, evaluator: Evaluator) -> Iterator[tuple[bool, ...]]:
        return recompute_flag_sets(evaluator.workload(split=self.split), evaluator.capacity, self.checkpoint)

    def _improved(self, best: EvaluatedSchedule) -> Schedule:
        """Return the schedule improved by swaps, within the limit. A swap keeps the saved memory of its row; the values count in a
        shorter schedule.
        """
        schedule, evaluator = best.schedule, best.evaluator
        recomputed = {a.stage for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE}
        flags = [stage in recomputed for stage in range(schedule.n_stages)]
        workload = evaluator.workload(flags, split=self.split)
        slack = (inf,) * schedule.n_devices
        if self.limit is not None:
            peaks = evaluator.peaks(schedule)
            slack = tuple(most - peak for most, peak in zip(self.limit.capacity, peaks, strict=True))
        most = [evaluator.peak_saved(row) + more for row, more in zip(schedule.rows, slack, strict=True)]
        return improve(
            schedule,
            self.routes,
            self.costs,
            lambda device, row: evaluator.peak_saved(row) <= most[device],
            target=max(
                makespan_lower_bound(workload, self.n_microbatches, evaluator.capacity),
                host_lower_bound(workload, self.n_microbatches, self.costs),
            ),
            walks=int(self.effort * _SWAP_ACTIONS / sum(map(len, schedule.rows))),
            deadline=self.deadline,
            accepts=lambda shorter: not any(evaluator.excess(shorter)),
        )
