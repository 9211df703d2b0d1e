"""The check of an order: faults, what each rule of communicators makes of it, peaks, and the distance to the best.

    fault      a computation or a message is missing, doubled, out of place, or received out of turn
    deadlock   under a rule of communicators; the witness is a cycle of cells, each of which waits for the next
    stall      under a rule the step takes longer than with unlimited buffers; the witness is the longest wait in a queue

Times are in forwards of a stage: F, I and W take 1, B takes 2, messages take none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from pipecompile.errors import ScheduleError
from pipecompile.interchange.communicator_rules import CommunicatorRule, rules_named
from pipecompile.interchange.launch_graph import LaunchGraph, LaunchStep, graph_without_messages, launch_graph
from pipecompile.interchange.message_faults import at, message_faults
from pipecompile.interchange.pipeline_order import PipelineOrder, as_order
from pipecompile.interchange.reordering import with_messages
from pipecompile.ir import UNTRAINED, Kind, Schedule
from pipecompile.ir.certificate import relative_gap
from pipecompile.schedules.search.makespan_bound import makespan_lower_bound
from pipecompile.schedules.search.workload import make_workload
from pipecompile.simulation.costs import make_costs
from pipecompile.text.units import counted
from pipecompile.verifiers.routes import checked_routes
from pipecompile.verifiers.schedule import schedule_faults

__all__ = ["InFlightPeak", "OrderReport", "RuleVerdict", "check_order"]

_NEGLIGIBLE = 1e-9
_DESCRIPTIONS = {
    CommunicatorRule.BUFFERED: "unlimited buffers",
    CommunicatorRule.RENDEZVOUS: "sends that block until the receive is posted",
    CommunicatorRule.PAIR: "one queue per pair of ranks",
    CommunicatorRule.RANK: "one queue per rank",
    CommunicatorRule.LAZY: "communicators made at their first message",
}


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """The outcome under a rule, `runs`, `stalls` or `deadlocks`, with its witness. `makespan` is in forwards; None for a deadlock."""

    rule: CommunicatorRule
    outcome: str
    makespan: float | None
    witness: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.rule.value:10}  {self.outcome:9}  {_DESCRIPTIONS[self.rule]}"
        head += "" if self.makespan is None else f": makespan {self.makespan:g}"
        return "\n".join([head, *(f"    {line}" for line in self.witness)])


@dataclass(frozen=True, slots=True)
class InFlightPeak:
    """The most micro-batches in flight on a rank, and the cell that reaches it first; a stage counts 1/(stages on the rank)."""

    rank: int
    microbatches: float
    place: str


@dataclass(frozen=True, slots=True)
class OrderReport:
    """Result of `check_order`. `makespan` and `bound` are in forwards of a stage; None if there are faults, or no backward.

    `is_sound`: no fault, and no deadlock under any rule that was asked for.
    """

    order: PipelineOrder
    faults: tuple[str, ...] = ()
    verdicts: tuple[RuleVerdict, ...] = ()
    peaks: tuple[InFlightPeak, ...] = ()
    makespan: float | None = None
    bound: float | None = None
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        deadlocks = [verdict.rule.value for verdict in self.verdicts if verdict.outcome == "deadlocks"]
        return f"OrderReport({self.order.name!r}, {counted(len(self.faults), 'fault')}, deadlocks={deadlocks}, makespan={self.makespan})"

    @property
    def is_sound(self) -> bool:
        """Whether there is no fault, and no deadlock under any rule that was checked."""
        return not self.faults and all(verdict.outcome != "deadlocks" for verdict in self.verdicts)

    @property
    def gap(self) -> float | None:
        """Return the share of the makespan that another order could save at most."""
        return None if self.makespan is None or self.bound is None else relative_gap(self.makespan, self.bound)

    def __str__(self) -> str:
        lines = [_counts(self.order), *(f"fault: {fault}" for fault in self.faults), *map(str, self.verdicts)]
        if self.makespan is not None:
            bound = "" if self.bound is None else f", no order takes less than {self.bound:g} (gap {self.gap:.1%})"
            lines.append(f"with unlimited buffers: makespan {self.makespan:g}{bound}")
        lines += (f"rank {p.rank}: {counted(p.microbatches, 'micro-batch')} in flight at {p.place}" for p in self.peaks)
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, texts, lists and dicts."""
        return {
            "name": self.order.name, "source": self.order.source, "n_ranks": self.order.n_ranks, "sound": self.is_sound,
            "faults": list(self.faults),
            "rules": {v.rule.value: {"outcome": v.outcome, "makespan": v.makespan, "witness": list(v.witness)} for v in self.verdicts},
            "makespan": self.makespan, "bound": self.bound, "gap": self.gap,
            "peaks": [{"rank": p.rank, "microbatches": p.microbatches, "place": p.place} for p in self.peaks],
            "notes": list(self.notes),
        }  # fmt: skip


def check_order(order: PipelineOrder | Schedule, rules: Iterable[str] | str | None = None) -> OrderReport:
    """Return the faults of a pipeline, its deadlocks and stalls under rules of communicators, its peaks and its distance to the best.

    `rules` are names, a list or a text with commas: buffered, rendezvous, pair, rank, lazy; None for all. Linear in the number of
    cells for each rule.
    """
    order = as_order(order)
    named = tuple(CommunicatorRule) if rules is None else rules_named(rules)
    faults = list(_faults(order))
    if faults:
        return OrderReport(order, tuple(faults))
    schedule, notes = order.schedule, []
    judged = order
    if not order.has_communication:
        judged = with_messages(order)
        if schedule.n_devices > 1:
            notes.append("The file has no communication: the rules are those of the order that --repair would write.")
    graph = launch_graph(judged, CommunicatorRule.BUFFERED)
    free = graph.times()
    makespan = None if graph.cycle(free) else max(free.values())
    verdicts = tuple(_verdict(judged, rule, makespan) for rule in named)
    bound = _bound(order, schedule) if makespan is not None else None
    return OrderReport(order, (), verdicts, tuple(_peaks(order, schedule)), makespan, bound, tuple(notes))


def _faults(order: PipelineOrder) -> Iterator[str]:
    try:
        schedule = order.schedule
    except ScheduleError as error:
        yield f"{error.what}{f' ({error.where})' if error.where else ''}"
        return
    routes = checked_routes(None, schedule.n_stages)
    if faults := schedule_faults(replace(schedule, overlaps=frozenset()), routes):
        yield from faults
        return
    graph = graph_without_messages(order)
    if cycle := graph.cycle(graph.times()):
        yield "computations wait for one another:\n  " + "\n  ".join(_witness(order, cycle))
        return
    if schedule.overlaps:
        yield from schedule_faults(schedule, routes)
    yield from message_faults(order)


def _verdict(order: PipelineOrder, rule: CommunicatorRule, free: float | None) -> RuleVerdict:
    graph = launch_graph(order, rule)
    ends = graph.times()
    if cycle := graph.cycle(ends):
        return RuleVerdict(rule, "deadlocks", None, tuple(_witness(order, cycle)))
    makespan = max(ends.values())
    if free is not None and makespan > free * (1 + _NEGLIGIBLE):
        return RuleVerdict(rule, "stalls", makespan, tuple(_longest_wait(order, graph, ends)))
    return RuleVerdict(rule, "runs", makespan)


def _witness(order: PipelineOrder, cycle: Sequence[LaunchStep]) -> Iterator[str]:
    """Yield a line per rank of a cycle: where it stands, the cell of another rank that it waits for, and its own cell behind that."""
    places = [(step.rank, step.place) for step in cycle]
    turn = next((i for i, (rank, _) in enumerate(places) if places[i - 1][0] != rank), 0)
    segments = [list(group) for _, group in groupby([*places[turn:], *places[:turn]], key=lambda place: place[0])]
    for segment, following in zip(segments, [*segments[1:], segments[0]], strict=True):
        (rank, entered), (_, left), (peer, awaited) = segment[0], segment[-1], following[0]
        row = order.rows[rank]
        behind = f"; cell {entered + 1} {row[entered]} comes behind it" if entered != left else ""
        yield f"{at(rank, left, row[left])} waits for {at(peer, awaited, order.rows[peer][awaited])}{behind}"


def _longest_wait(order: PipelineOrder, graph: LaunchGraph, ends: dict[LaunchStep, float]) -> Iterator[str]:
    """Yield the longest wait of a message behind another in its queue, or of a rank at a message."""
    waits = []
    for step in graph.waits:
        before = [ends[LaunchStep("passed", step.rank, step.place - 1)]] if step.place else [0.0]
        if step.phase == "ready" and step in graph.queued:
            behind = graph.queued[step]
            waits.append((ends[behind] - before[0], -before[0], step, behind))
    if waits and max(waits)[0] > 0:
        seconds, begin, step, behind = max(waits)
        first, second = (at(each.rank, each.place, order.rows[each.rank][each.place]) for each in (step, behind))
        yield f"{first} could go at {-begin:g} and stands for {seconds:g} behind {second}"


def _peaks(order: PipelineOrder, schedule: Schedule) -> Iterator[InFlightPeak]:
    trained = {a.stage for row in schedule.rows for a in row if a.kind not in UNTRAINED}
    change = {Kind.FORWARD: 1, Kind.RELOAD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1, Kind.OFFLOAD: -1}
    for rank, row in enumerate(order.rows):
        count = peak = 0
        place = ""
        for index, cell in enumerate(row):
            for action in cell.actions:
                count += change.get(action.kind, 0) if action.stage in trained else 0
                if count > peak:
                    peak, place = count, f"cell {index + 1} {cell}"
        if peak:
            yield InFlightPeak(rank, peak / schedule.placement.count(rank), place)


def _bound(order: PipelineOrder, schedule: Schedule) -> float | None:
    """Return a lower bound on the makespan of all orders of these stages, in forwards; None without backwards."""
    if all(action.kind is Kind.FORWARD for row in schedule.rows for action in row):
        return None
    seconds = order.weights or 1.0
    routes = checked_routes(None, schedule.n_stages)
    costs = make_costs(
        schedule.n_stages, schedule.n_devices, routes, forward=seconds, input_grad=seconds, weight_grad=seconds
    )
    workload = make_workload(schedule.placement, routes, costs, split=schedule.is_split)
    return makespan_lower_bound(workload, schedule.n_microbatches)


def _counts(order: PipelineOrder) -> str:
    cells = sum(bool(cell.actions) for _, _, cell in order.cells())
    messages = sum(cell.is_send for _, _, cell in order.cells())
    return f"{order.name} ({order.source}): {counted(order.n_ranks, 'rank')}, {counted(cells, 'computation')}, {counted(messages, 'message')}"
