"""The evaluation of one candidate of the joint search: cut the graph, draft the stages, simulate the step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from pipecompile.costs import NodeCost
from pipecompile.errors import InfeasibleError, InputError, PipecompileError, ScheduleError
from pipecompile.ir import Schedule
from pipecompile.ir.candidates import Candidate, Considered
from pipecompile.options import Options
from pipecompile.partitioners import Partition, Problem, stage_loads
from pipecompile.partitioners.incumbent import GAP
from pipecompile.partitioners.solver import with_cut
from pipecompile.planning.cost_table import CostTable, MeasuredCosts
from pipecompile.planning.draft import Draft, by_depth, make_draft, peak_in_flight
from pipecompile.planning.infeasible_hint import with_enough_stages
from pipecompile.planning.planner import Planned, make_problem, planned, problem_for
from pipecompile.planning.schedule_choice import make_schedule
from pipecompile.planning.solve_cut import memory_excess, solve_cut, warn_of_gap
from pipecompile.planning.step_search import shorten_step, step_seconds, with_searched_step
from pipecompile.text.units import counted
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Evaluated", "CandidateEvaluator", "Point"]

_LEAST_SECONDS = 0.05
"""The least time that a solver gets for one cut."""


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A point of the search space: a number of micro-batches of `samples` samples, and a schedule.

    A point without a schedule is ruled out before it is cut: `reason` says why, and `error` is what was raised, if anything.
    """

    count: int
    samples: int | None
    options: Options
    schedule: Schedule | None = None
    reason: str = ""
    error: PipecompileError | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """A row of the comparison. `draft` is None if the point was ruled out or does not fit the memory."""

    candidate: Candidate
    point: Point
    draft: Draft | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the simulated step."""
        assert self.candidate.seconds is not None
        return self.candidate.seconds

    @property
    def sort_key(self) -> tuple[int, float]:
        seconds = self.candidate.seconds
        return self.candidate.n_microbatches, float("inf") if seconds is None else seconds


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An error of a point. `key` orders refusals by how little memory their point needs."""

    key: tuple[int, float, str]
    error: PipecompileError
    point: Point


@dataclass(slots=True)
class CandidateEvaluator:
    """Evaluates the points of one graph. Cuts are kept by problem, since several schedules share one.

    `seconds_spent` counts the time for cuts; once a candidate fits, no more than `budget` seconds go into cuts.
    """

    graph: TracedGraph
    options: Options
    table: CostTable
    n_counts: int
    seconds_spent: float = 0.0
    has_fit: bool = False
    _cuts: dict[tuple[object, ...], tuple[Partition, Problem]] = field(default_factory=dict)
    _refusals: list[_Refusal] = field(default_factory=list)
    _barred: list[Point] = field(default_factory=list)

    @property
    def budget(self) -> float:
        """Seconds for comparing candidates: half of `time_limit`. The other half solves the winner's cut again."""
        return self.options.time_limit / 2

    def evaluate(self, point: Point) -> Evaluated:
        """Cut and simulate a point, or say why not."""
        if point.schedule is None:
            return self._ruled_out(point)
        candidate = Candidate(point.count, point.schedule.name)
        if self.has_fit and self.seconds_spent > self.budget:
            return Evaluated(replace(candidate, left_out="not tried: half of time_limit was up"), point)
        problem = make_problem(self.graph, self._costs(point), point.options, point.schedule)
        try:
            cut, solved = self._cut(point.options.steering.on(self.graph, problem), point.samples)
        except InfeasibleError as error:
            key = point.count, -sum(problem.in_flight or ()), candidate.schedule
            self._refusals.append(_Refusal(key, error, point))
            return Evaluated(replace(candidate, left_out=error.where or error.what), point)
        draft = self._by_depth(point, self._draft(point, cut, solved, point.schedule.placement))
        return self._simulated(candidate, point, draft, None)

    def _ruled_out(self, point: Point) -> Evaluated:
        if point.error is not None:
            self._refusals.append(_Refusal((point.count, 0.0, ""), point.error, point))
        else:
            self._barred.append(point)
        name = str(point.options.schedule) if isinstance(point.error, ScheduleError) else ""
        return Evaluated(Candidate(point.count, name, left_out=point.reason), point)

    def _costs(self, point: Point) -> dict[str, NodeCost]:
        return self._measured(point).by_node

    def _measured(self, point: Point) -> MeasuredCosts:
        costs = self.table[point.samples]
        assert isinstance(costs, MeasuredCosts), "points of sizes that cannot be measured are ruled out"
        return costs

    def _cut(self, problem: Problem, samples: int | None) -> tuple[Partition, Problem]:
        """Return the cut without a memory limit if that cut fits, else one under the limit."""
        unlimited = replace(problem, memory_limit=None, in_flight=None)
        cut, solved = self._solved(unlimited, (samples, problem.placement))
        solved = replace(solved, memory_limit=problem.memory_limit, in_flight=problem.in_flight)
        if not memory_excess(solved, cut, self.options.n_stages):
            return cut, solved
        return self._solved(problem, (samples, problem.placement, problem.in_flight))

    def _solved(self, problem: Problem, key: tuple[object, ...]) -> tuple[Partition, Problem]:
        if key not in self._cuts:
            seconds = max(self.budget / self.n_counts / 2, _LEAST_SECONDS)
            begin = monotonic()
            try:
                self._cuts[key] = solve_cut(
                    self.graph, problem, replace(self.options, partitioner="dp", time_limit=seconds)
                )
            finally:
                self.seconds_spent += monotonic() - begin
        return self._cuts[key]

    def _draft(self, point: Point, cut: Partition, solved: Problem, placement: tuple[int, ...]) -> Draft:
        return make_draft(self.graph, cut, solved, self._costs(point), self.options, placement, point.samples)

    def _by_depth(self, point: Point, draft: Draft) -> Draft:
        return by_depth(self.graph, draft, self._costs(point), point.options, point.count, point.samples)

    def _simulated(self, candidate: Candidate, point: Point, draft: Draft, schedule: Schedule | None) -> Evaluated:
        """Return the row with the step that a pipeline of this draft runs. None: the schedule that the options ask for."""
        placement, cut, options = draft.placement, draft.partition, point.options
        if schedule is None:
            final = options.with_recompute(cut.recompute)
            schedule = make_schedule(final, draft.stages, draft.routes, placement, candidate.n_microbatches)
        on_devices = replace(draft.problem, placement=placement, memory_limit=None)
        loads = stage_loads(on_devices, cut.stage_of, options.n_stages, cut.recompute or None)
        over = memory_excess(draft.problem, cut, options.n_stages)
        self.has_fit = self.has_fit or not over
        row = replace(
            candidate,
            recompute=cut.recompute,
            bottleneck=cut.bottleneck,
            seconds=step_seconds(draft, schedule, options),
            memory=tuple(load.memory for load in loads),
            left_out=over,
        )
        return Evaluated(row, point, None if over else draft)

    def with_searched_schedule(self, row: Evaluated) -> Evaluated:
        """Return the row's cut under a schedule that is searched for it."""
        draft, point = row.draft, row.point
        assert draft is not None
        candidate, options = Candidate(point.count, "auto"), replace(point.options, schedule="auto")
        point = replace(point, options=options)
        final = options.with_recompute(draft.partition.recompute)
        try:
            schedule = make_schedule(final, draft.stages, draft.routes, draft.placement, point.count)
        except ScheduleError as error:
            return Evaluated(replace(candidate, left_out=error.why or error.what), point)
        problem = replace(draft.problem, in_flight=peak_in_flight(schedule, options))
        searched = self._draft(point, draft.partition, problem, draft.placement)
        return self._simulated(candidate, point, replace(searched, step=draft.step), schedule)

    def with_shorter_step(self, row: Evaluated, first: Evaluated) -> Evaluated:
        """Return the row with the cut that has the shortest step under the row's schedule. `first` is the row with the cut of the
        least bottleneck, to which the summary of the step compares.
        """
        draft, point = row.draft, row.point
        assert draft is not None
        assert first.draft is not None
        draft = self._shortened(point, draft)
        if draft.step is not None and first is not row:
            least = first.draft.partition.bottleneck
            draft = replace(draft, step=replace(draft.step, first_seconds=first.seconds, first_bottleneck=least))
        return self._simulated(row.candidate, point, draft, None)

    def with_cut_of(self, row: Evaluated, other: Evaluated) -> Evaluated:
        """Return the row with the cut of another row if that fits the memory and makes its step shorter, else the row."""
        draft, point = row.draft, row.point
        assert draft is not None
        assert other.draft is not None
        stage_of = other.draft.partition.stage_of
        if stage_of == draft.partition.stage_of or draft.placement != other.draft.placement:
            return row
        partition = with_cut(draft.partition, draft.problem, stage_of, self.options.n_stages)
        moved = self._by_depth(point, self._draft(point, partition, draft.problem, draft.placement))
        better = self._simulated(row.candidate, point, moved, None)
        return better if better.draft is not None and better.seconds < row.seconds * (1 - GAP) else row

    def _shortened(self, point: Point, draft: Draft) -> Draft:
        if point.options.schedule == "auto":
            return draft
        return shorten_step(self.graph, draft, self._costs(point), point.options, point.count, point.samples)

    def cut_again(self, row: Evaluated) -> Evaluated:
        """Return the row cut with the partitioner that the user chose if that makes the step shorter, else the row."""
        draft = row.draft
        assert draft is not None
        if self.options.partitioner == "dp" or _is_proven(draft):
            return row
        seconds = max(self.options.time_limit - self.seconds_spent, self.budget, _LEAST_SECONDS)
        cut, solved = solve_cut(self.graph, draft.problem, replace(self.options, time_limit=seconds))
        warn_of_gap(cut, self.options)
        again = self._by_depth(row.point, self._draft(row.point, cut, solved, draft.placement))
        again = self._shortened(row.point, again)
        candidate = Candidate(row.candidate.n_microbatches, row.candidate.schedule)
        better = self._simulated(candidate, row.point, again, None)
        return better if better.draft is not None and better.seconds < row.seconds else row

    def plan(self, row: Evaluated, considered: Considered) -> Planned:
        """Return the row as a plan."""
        draft, point = row.draft, row.point
        assert draft is not None
        schedule = point.options.schedule_for(point.count)
        problem = make_problem(self.graph, self._costs(point), point.options, schedule)
        problem = replace(problem, in_flight=draft.problem.in_flight, placement=draft.problem.placement)
        costs = self._measured(point)
        if point.options.schedule == "auto":
            draft = with_searched_step(self.graph, draft, point.options, point.count, row.seconds)
        return planned(self.graph, draft, problem, costs, self.options, point.samples, considered)

    def nothing_fits(self) -> PipecompileError:
        """Return the error of the point that needs the least memory: most micro-batches, fewest of them in flight.

        Return an InputError with the first reason if the recording serves none of the numbers of micro-batches.
        """
        if not self._refusals:
            return _none_served(self._barred[0], self.n_counts)
        infeasible = [refusal for refusal in self._refusals if isinstance(refusal.error, InfeasibleError)]
        refusal = max(infeasible or self._refusals, key=lambda refusal: refusal.key)
        (count, _, schedule), error, point = refusal.key, refusal.error, refusal.point
        if not infeasible:
            return error
        error = InfeasibleError(
            error.what + f", with none of {self.n_counts} numbers of micro-batches" * (self.n_counts > 1),
            where=f"{counted(count, 'micro-batch')}, {schedule}: {error.where}",
            why=error.why,
            hint=error.hint,
        )
        return with_enough_stages(error, partial(problem_for, self.graph, self._costs(point), count), point.options)


def _is_proven(draft: Draft) -> bool:
    """Return whether the least bottleneck is known: that of the draft, or of the cut from which a shorter step led away."""
    partition, step = draft.partition, draft.step
    if step is None or partition.method != "step":
        return partition.status == "optimal"
    return step.first_bottleneck - partition.lower_bound <= GAP * step.first_bottleneck


def _none_served(first: Point, n_counts: int) -> InputError:
    count = first.options.default_microbatches
    return InputError(
        f'n_microbatches="auto": the recording serves none of {n_counts} numbers of micro-batches',
        where=f"{counted(first.count, 'micro-batch')}, the largest of {first.samples} samples",
        why=first.reason,
        hint=f"n_microbatches={count}: a number that is not compared with others may be recorded several times",
    )
