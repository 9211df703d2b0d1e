"""The whole choice: number of micro-batches, schedule, recomputation and cut together, by the simulated step.

    sizes of micro-batches ─▶ costs of each ─┬─▶ a cut for each size ─▶ every schedule that suits ─▶ simulated ─┐
                                             └─▶ one more where that does not fit the memory ──────────────────┤
                                       the shortest step ◀─ cut with all that is left of the time ◀─ search ◀──┘

Smaller micro-batches leave less bubble and less in flight, and compute less efficiently: the graph serves all sizes, so each
size has costs of its own. Half of the time limit is for the comparison, by dynamic programming alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import log
from time import monotonic

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.microbatches import MiniBatch, sizes
from pipecompile.costs import CostError, NodeCost
from pipecompile.costs.profile import REPEATS
from pipecompile.errors import InfeasibleError, PipecompileError, ScheduleError
from pipecompile.ir import Schedule
from pipecompile.ir.candidates import Candidate, Considered
from pipecompile.ir.plan import Plan
from pipecompile.ir.training_routes import training_routes
from pipecompile.options import Options
from pipecompile.partitioners import Partition, Problem, stage_loads
from pipecompile.planning.infeasible_hint import with_enough_stages
from pipecompile.planning.microbatch_counts import barred
from pipecompile.planning.planner import (
    Draft,
    asked_problem,
    check_bearable,
    drafted,
    flying,
    make_problem,
    measured,
    plan_of,
    unforced_bottleneck,
    warn_of_gap,
)
from pipecompile.planning.schedule_choice import costs_of, schedule_of
from pipecompile.planning.solve_cut import cut, excess
from pipecompile.schedules import CATALOGUE, Builder
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.simulation.costs import make_costs
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["choose"]

_SEARCHED = 3
"""For how many of the best cuts a schedule is searched for."""

_SAME = 1e-9
"""A step that is shorter by less than this share is not shorter."""


def choose(
    graph: TracedGraph, whole: FlatInputs, options: Options, counts: Sequence[int]
) -> tuple[Plan, Problem, int | None]:
    """The plan with the shortest simulated step among `counts` of micro-batches, with all that was considered; the problem it
    solves, and how many samples its micro-batches have.

    Raises InfeasibleError when nothing fits the memory, CostError or InputError when the model bears none of the counts.
    """
    check_bearable(graph, options.n_stages)
    comparison = _Comparison(graph, whole, options, tuple(counts))
    entries = [entry for count in comparison.by_promise() for entry in comparison.of_count(count)]
    if options.schedule == "auto":
        entries += comparison.searched(entries)
    fitting = [entry for entry in entries if entry.draft is not None]
    if not fitting:
        raise comparison.nothing_fits()
    shortest = min(entry.seconds for entry in fitting)
    best = next(entry for entry in fitting if entry.seconds <= shortest * (1 + _SAME))
    better = comparison.cut_well(best)
    rows = sorted([better if entry is best else entry for entry in entries], key=lambda entry: entry.order)
    considered = Considered(tuple(entry.row for entry in rows), rows.index(better))
    return comparison.plan(better, considered)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A candidate, and when it fits what it was compared by."""

    row: Candidate
    options: Options
    draft: Draft | None = None

    @property
    def seconds(self) -> float:
        assert self.row.seconds is not None
        return self.row.seconds

    @property
    def order(self) -> tuple[int, float]:
        seconds = self.row.seconds
        return self.row.n_microbatches, float("inf") if seconds is None else seconds


@dataclass(slots=True)
class _Comparison:
    """What is known so far: costs by size, cuts by problem, errors of what cannot be, seconds spent on cuts, and whether
    anything fits.
    """

    graph: TracedGraph
    whole: FlatInputs
    options: Options
    counts: tuple[int, ...]
    costs: dict[int | None, tuple[str, dict[str, NodeCost]]] = field(default_factory=dict)
    cuts: dict[tuple[object, ...], tuple[Partition, Problem]] = field(default_factory=dict)
    errors: list[tuple[tuple[int, float, str], PipecompileError, Options]] = field(default_factory=list)
    spent: float = 0.0
    fits: bool = False

    @property
    def half(self) -> float:
        """Seconds for the comparison; as many are for the cut that is chosen."""
        return self.options.time_limit / 2

    def by_promise(self) -> list[int]:
        """The counts, those first that are nearest to the default, in case that time runs out."""
        usual = self.options.default_microbatches
        return sorted(self.counts, key=lambda count: abs(log(count / usual)))

    # -- one number of micro-batches --------------------------------------------------------------------------------

    def of_count(self, count: int) -> Iterator[_Entry]:
        """Every schedule of so many micro-batches that suits; the count itself when the model does not bear it."""
        samples = self.whole.samples if len(self.counts) > 1 else None  # one that is given is dealt with when it runs
        reason = (barred(self.graph, sizes(samples, count)) if samples else "") or self._measure(count)
        if reason:
            yield _Entry(Candidate(count, left_out=reason), self.options)
            return
        seen = set[tuple[object, ...]]()
        for name in self._names():
            options = replace(self.options, n_microbatches=count, schedule=name)
            try:
                schedule = options.schedule_for(count)
            except ScheduleError as error:
                self.errors.append(((count, 0.0, ""), error, options))
                yield _Entry(Candidate(count, str(name), left_out=error.what), options)
                continue
            if (schedule.placement, schedule.rows) not in seen:  # some are the same for few stages
                seen.add((schedule.placement, schedule.rows))
                yield self._entry(count, options, schedule)

    def _names(self) -> list[str | Schedule | Builder]:
        if self.options.schedule != "auto":
            return [self.options.schedule]
        counts = self.options.n_stages, len(self.options.devices)
        return [name for name, entry in CATALOGUE.items() if name != "forward" and entry.suits(*counts)]

    def _measure(self, count: int) -> str:
        """Take the costs of its size, and say why that cannot be done."""
        size = self._size(count)
        if size in self.costs:
            return ""
        part = self.whole if size is None else MiniBatch(self.whole, sizes(self.whole.samples or 1, count)).first
        repeats = replace(REPEATS, budget=REPEATS.budget / len(self.counts))
        try:
            self.costs[size] = measured(self.graph, part.leaves, self.options, repeats)
        except CostError as error:
            self.errors.append(((count, 0.0, ""), error, self.options))
            return error.what
        return ""

    def _size(self, count: int) -> int | None:
        """How many samples the largest of so many micro-batches has."""
        return None if self.whole.samples is None else sizes(self.whole.samples, count)[0]

    # -- one candidate ----------------------------------------------------------------------------------------------

    def _entry(self, count: int, options: Options, schedule: Schedule) -> _Entry:
        """Cut and simulated, or why not."""
        row, size = Candidate(count, schedule.name), self._size(count)
        if self.fits and self.spent > self.half:
            return _Entry(replace(row, left_out="not tried: half of time_limit was up"), options)
        problem = make_problem(self.graph, self.costs[size][1], options, schedule)
        try:
            found, solved = self._cut(options.steering.on(self.graph, problem), size)
        except InfeasibleError as error:
            self.errors.append(((count, -sum(problem.in_flight or ()), row.schedule), error, options))
            return _Entry(replace(row, left_out=error.where or error.what), options)
        return self._simulated(row, options, self._draft(count, found, solved, schedule.placement), None)

    def _cut(self, problem: Problem, size: int | None) -> tuple[Partition, Problem]:
        """The cut of this size, whatever stages hold, where that fits; else one that fits."""
        free = replace(problem, memory_limit=None, in_flight=None)
        found, solved = self._solved(free, (size, problem.placement))
        solved = replace(solved, memory_limit=problem.memory_limit, in_flight=problem.in_flight)
        if not excess(solved, found, self.options.n_stages):
            return found, solved
        return self._solved(problem, (size, problem.placement, problem.in_flight))

    def _solved(self, problem: Problem, key: tuple[object, ...]) -> tuple[Partition, Problem]:
        if key not in self.cuts:
            share = max(self.half / len(self.counts) / 2, 0.05)
            quick = replace(self.options, partitioner="dp", time_limit=share)
            begin = monotonic()
            try:
                self.cuts[key] = cut(self.graph, problem, quick)
            finally:
                self.spent += monotonic() - begin
        return self.cuts[key]

    def _draft(self, count: int, found: Partition, solved: Problem, placement: tuple[int, ...]) -> Draft:
        size = self._size(count)
        return drafted(self.graph, found, solved, self.costs[size][1], self.options, placement, size)

    def _simulated(self, row: Candidate, options: Options, draft: Draft, schedule: Schedule | None) -> _Entry:
        """With the step that a pipeline of this draft will run."""
        placement, found = draft.placement, draft.found
        if schedule is None:
            settled = options.with_recompute(found.recompute)
            schedule = schedule_of(settled, draft.stages, draft.routes, placement, row.n_microbatches)
        ways = training_routes(
            draft.routes, options.n_stages, options.loss_fn is not None
        )  # outputs go to where the loss is
        given = costs_of(draft.stages, ways, options.links, placement)
        costs = make_costs(options.n_stages, len(options.devices), ways, **given)
        on_devices = replace(draft.problem, placement=placement, memory_limit=None)
        loads = stage_loads(on_devices, found.stage_of, options.n_stages, found.recompute or None)
        row = replace(
            row,
            recompute=found.recompute,
            bottleneck=found.bottleneck,
            seconds=Evaluator(placement, ways, costs, None).seconds(schedule),
            memory=tuple(load.memory for load in loads),
        )
        over = excess(draft.problem, found, options.n_stages)
        self.fits = self.fits or not over
        return _Entry(replace(row, left_out=over), options, None if over else draft)

    # -- the best few -----------------------------------------------------------------------------------------------

    def searched(self, entries: Sequence[_Entry]) -> list[_Entry]:
        """A schedule made for each of the best cuts."""
        fitting = sorted((entry for entry in entries if entry.draft), key=lambda entry: entry.seconds)
        best: dict[tuple[object, ...], _Entry] = {}
        for entry in fitting:
            assert entry.draft is not None
            cells = tuple(entry.draft.found.stage_of.values())
            best.setdefault((entry.row.n_microbatches, entry.draft.placement, cells), entry)
        return [self._searched(entry) for entry in list(best.values())[:_SEARCHED]]

    def _searched(self, entry: _Entry) -> _Entry:
        draft, count = entry.draft, entry.row.n_microbatches
        assert draft is not None
        row, options = Candidate(count, "auto"), replace(entry.options, schedule="auto")
        settled = options.with_recompute(draft.found.recompute)
        try:
            made = schedule_of(settled, draft.stages, draft.routes, draft.placement, count)
        except ScheduleError as error:
            return _Entry(replace(row, left_out=error.why or error.what), options)
        problem = replace(draft.problem, in_flight=flying(made, options))
        return self._simulated(row, options, self._draft(count, draft.found, problem, draft.placement), made)

    def cut_well(self, entry: _Entry) -> _Entry:
        """The same, cut with the partitioner that was asked for, where that makes the step shorter."""
        draft = entry.draft
        assert draft is not None
        if self.options.partitioner == "dp" or draft.found.status == "optimal":
            return entry
        seconds = max(self.options.time_limit - self.spent, self.half)
        found, solved = cut(self.graph, draft.problem, replace(self.options, time_limit=seconds))
        warn_of_gap(found, self.options)
        other = self._draft(entry.row.n_microbatches, found, solved, draft.placement)
        better = self._simulated(Candidate(entry.row.n_microbatches, entry.row.schedule), entry.options, other, None)
        return better if better.draft is not None and better.seconds < entry.seconds else entry

    def plan(self, entry: _Entry, considered: Considered) -> tuple[Plan, Problem, int | None]:
        draft, count = entry.draft, entry.row.n_microbatches
        assert draft is not None
        cost, costs = self.costs[self._size(count)]
        plain = make_problem(self.graph, costs, entry.options, entry.options.schedule_for(count))
        plain = replace(plain, in_flight=draft.problem.in_flight, placement=draft.problem.placement)
        free = unforced_bottleneck(self.graph, plain, draft.found, self.options)
        plan = plan_of(self.graph, draft, cost, self.options, unforced=free, considered=considered)
        return plan, draft.problem, self._size(count)

    def nothing_fits(self) -> PipecompileError:
        """The error of what needs the least memory: the most micro-batches, and the fewest of them in flight."""
        infeasible = [each for each in self.errors if isinstance(each[1], InfeasibleError)]
        (count, _, schedule), error, options = max(infeasible or self.errors, key=lambda each: each[0])
        if not infeasible:
            return error
        told = InfeasibleError(
            error.what + f", with none of {len(self.counts)} numbers of micro-batches" * (len(self.counts) > 1),
            where=f"{count} micro-batches, {schedule}: {error.where}",
            why=error.why,
            hint=error.hint,
        )
        more = partial(asked_problem, self.graph, self.costs[self._size(count)][1], count)
        return with_enough_stages(told, more, options)
