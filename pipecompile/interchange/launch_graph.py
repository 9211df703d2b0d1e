"""The graph of an order under a rule of communicators: the steps of each cell, what they wait for, and their seconds.

    passed(rank, i)    the rank has done cell i, or has posted its message
    ready(rank, i)     the message of cell i is first in its queue, and posted
    moved(rank, i)     the message of cell i is sent, or has come
    met(rank, i)       the rank has come to cell i, its first message with a peer, under the rule `lazy`

Times are longest paths. Steps that no order can run are a deadlock; one cycle of them is the witness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipecompile.interchange.communicator_rules import CommunicatorRule
from pipecompile.interchange.pipeline_order import OrderCell, PipelineOrder
from pipecompile.ir import BACKWARDS, SHARDING, Kind

__all__ = ["LaunchGraph", "LaunchStep", "computed_before", "graph_without_messages", "launch_graph", "received_by"]

UNIT = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.INPUT_GRAD: 1.0,
    Kind.WEIGHT_GRAD: 1.0,
    Kind.RECOMPUTE: 1.0,
    Kind.OFFLOAD: 0.0,
    Kind.RELOAD: 0.0,
    **dict.fromkeys(SHARDING, 0.0),
}
"""Seconds of each kind of computation relative to a forward."""


class LaunchStep(NamedTuple):
    """A step of cell number `place` of `rank`. `phase` is passed, ready, moved or met."""

    phase: str
    rank: int
    place: int


@dataclass(slots=True)
class LaunchGraph:
    """Per step, the steps before it and its seconds; `queued` has what is before a message in its queue."""

    waits: dict[LaunchStep, list[LaunchStep]] = field(default_factory=dict)
    seconds: dict[LaunchStep, float] = field(default_factory=dict)
    queued: dict[LaunchStep, LaunchStep] = field(default_factory=dict)

    def times(self) -> dict[LaunchStep, float]:
        """Return when each step ends, in the unit of the seconds. Steps that wait forever are left out. Linear."""
        left = {step: len(before) for step, before in self.waits.items()}
        after: dict[LaunchStep, list[LaunchStep]] = {step: [] for step in self.waits}
        for step, before in self.waits.items():
            for other in before:
                after[other].append(step)
        ends: dict[LaunchStep, float] = {}
        ready = [step for step, count in left.items() if not count]
        while ready:
            step = ready.pop()
            start = max((ends[other] for other in self.waits[step]), default=0.0)
            ends[step] = start + self.seconds.get(step, 0.0)
            for other in after[step]:
                left[other] -= 1
                if not left[other]:
                    ready.append(other)
        return ends

    def cycle(self, ends: dict[LaunchStep, float]) -> list[LaunchStep]:
        """Return steps that each wait for the next, and the last for the first; none if all steps end."""
        step = next((step for step in self.waits if step not in ends), None)
        if step is None:
            return []
        place: dict[LaunchStep, int] = {}
        path: list[LaunchStep] = []
        while step not in place:
            place[step] = len(path)
            path.append(step)
            step = next(other for other in self.waits[step] if other not in ends)
        return path[place[step] :]


def cell_seconds(cell: OrderCell, weights: Sequence[float]) -> float:
    """Return the seconds of a cell: F, I, W, R take the weight of their stage, B twice as much; messages take none."""
    return sum(UNIT[a.kind] * (weights[a.stage] if weights else 1.0) for a in cell.actions)


def launch_graph(order: PipelineOrder, rule: CommunicatorRule) -> LaunchGraph:
    """Return the graph of an order whose messages are all paired."""
    graph, places = LaunchGraph(), {(rank, cell): index for rank, index, cell in order.cells() if cell.is_transfer}
    placement = order.schedule.placement
    last: dict[tuple[int, int], LaunchStep] = {}
    met: set[tuple[int, int]] = set()
    for rank, index, cell in order.cells():
        before = [LaunchStep("passed", rank, index - 1)] if index else []
        passed = LaunchStep("passed", rank, index)
        graph.waits[passed] = [*before, *_reads(rank, cell, places)]
        graph.seconds[passed] = cell_seconds(cell, order.weights)
        if not cell.is_transfer:
            continue
        peer = placement[cell.partner.stage]
        other = LaunchStep("ready", peer, places[peer, cell.partner])
        queue = rank, rank if rule is CommunicatorRule.RANK else peer
        _add_message(graph, passed, other, cell.is_send, rule, last.get(queue) if rule.is_queued else None)
        last[queue] = LaunchStep("moved", rank, index)
        if rule is CommunicatorRule.LAZY and (rank, peer) not in met:
            met.add((rank, peer))
            _join(graph, passed, order, placement, peer)
    return graph


def _reads(rank: int, cell: OrderCell, places: dict[tuple[int, OrderCell], int]) -> list[LaunchStep]:
    """Return the messages that a cell waits for: what its computations read, or the send of WAIT_SEND."""
    needs = received_by(cell)
    if cell.op.startswith("WAIT_SEND"):
        needs = [OrderCell(cell.stage, cell.op.removeprefix("WAIT_"), cell.microbatch)]
    return [LaunchStep("moved", rank, places[rank, need]) for need in needs if (rank, need) in places]


def _add_message(
    graph: LaunchGraph,
    passed: LaunchStep,
    other: LaunchStep,
    is_send: bool,
    rule: CommunicatorRule,
    queued: LaunchStep | None,
) -> None:
    """Add the steps of the message that the cell of `passed` posts; `other` is that of its peer, `queued` the message before it."""
    ready, moved = passed._replace(phase="ready"), passed._replace(phase="moved")
    graph.waits[ready] = [*graph.waits[passed], *([] if queued is None else [queued])]
    if queued is not None:
        graph.queued[ready] = queued
    waits_for_peer = not (rule is CommunicatorRule.BUFFERED and is_send)
    graph.waits[moved] = [ready, other] if waits_for_peer else [ready]
    if rule is CommunicatorRule.RENDEZVOUS and is_send:
        graph.waits[passed] = [*graph.waits[passed], moved]


def _join(graph: LaunchGraph, passed: LaunchStep, order: PipelineOrder, placement: Sequence[int], peer: int) -> None:
    """Let the first message of two ranks wait until the other rank comes to its first message with this rank."""
    first = next(
        index
        for index, cell in enumerate(order.rows[peer])
        if cell.is_transfer and placement[cell.partner.stage] == passed.rank
    )
    met, ready = LaunchStep("met", peer, first), passed._replace(phase="ready")
    graph.waits[met] = [LaunchStep("passed", peer, first - 1)] if first else []
    graph.waits[passed] = [*graph.waits[passed], met]
    graph.waits[ready] = [*graph.waits[ready], met]


def graph_without_messages(order: PipelineOrder) -> LaunchGraph:
    """Return the graph of the computations alone: each waits for those of other ranks that compute what it reads."""
    graph, places = LaunchGraph(), {}
    for rank, index, cell in order.cells():
        for action in cell.actions:
            places[action.stage, action.kind.value, action.microbatch] = LaunchStep("passed", rank, index)
    for rank, index, cell in order.cells():
        step = LaunchStep("passed", rank, index)
        needs = (places.get(key) for key in computed_before(cell))
        graph.waits[step] = [need for need in dict.fromkeys(needs) if need is not None and need.rank != rank]
        graph.waits[step] += [LaunchStep("passed", rank, index - 1)] if index else []
        graph.seconds[step] = cell_seconds(cell, order.weights)
    return graph


def received_by(cell: OrderCell) -> list[OrderCell]:
    """Return the receives whose values the computations of a cell read, if these come from another rank."""
    ops = {Kind.FORWARD: "RECV_F", Kind.BACKWARD: "RECV_B", Kind.INPUT_GRAD: "RECV_B"}
    return [OrderCell(a.stage, ops[a.kind], a.microbatch) for a in cell.actions if a.kind in ops]


def computed_before(cell: OrderCell) -> list[tuple[int, str, int]]:
    """Return stage, kind and micro-batch of the computations of neighbouring stages that the cell may wait for."""
    keys: list[tuple[int, str, int]] = []
    for action in cell.actions:
        if action.kind is Kind.FORWARD:
            keys.append((action.stage - 1, "F", action.microbatch))
        elif action.kind in BACKWARDS:
            keys += [(action.stage + 1, kind, action.microbatch) for kind in "BI"]
    return keys
