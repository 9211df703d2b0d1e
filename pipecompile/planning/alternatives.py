"""Alternatives for the report: other numbers of devices and micro-batches, and other schedules, computed without the model.

    numbers of stages ──▶ the graph cut anew for each ──▶ costs per stage ─┐
                                                                          ├─▶ simulated in the page of the report
    numbers of devices and micro-batches ──▶ the catalogue's orders ──────┘

A cut takes some hundredths of a second (dynamic programming alone). An order is a schedule as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from pipecompile.errors import PartitionError, ScheduleError, VerifyError
from pipecompile.ir import Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.what_if import Order, StageCosts, WhatIf
from pipecompile.partitioners import Problem, partition
from pipecompile.schedules import CATALOGUE, build_schedule

__all__ = ["unit_what_if", "what_if"]

_DEVICES, _MICROBATCHES = (2, 4, 8, 16), (4, 8, 16, 32, 64)
_MOST, _MOST_OF_OWN = 256, 1024
"""Largest product of devices and micro-batches whose catalogue goes into the page: 240 bytes each, 400 KB in all."""


def what_if(plan: Plan, problem: Problem | None, schedule: Schedule, transfer: dict[str, float]) -> WhatIf:
    """Return the alternatives to a plan. `transfer` has the seconds of every route, by value.

    Without a problem, other numbers of stages share the work evenly.
    """
    own = _order(schedule)
    costs = {plan.n_stages: _planned(plan, transfer)}
    counts = sorted({*_DEVICES, schedule.n_devices})
    for n_stages in sorted({chunks * count for count in counts for chunks in (1, 2)} - {plan.n_stages}):
        cut = _even(costs[plan.n_stages], n_stages) if problem is None else _cut_anew(plan, problem, n_stages)
        if cut is not None:
            costs[n_stages] = cut
    return _with_orders(own, costs, counts)


def unit_what_if(schedule: Schedule) -> WhatIf:
    """Return the alternatives to a schedule without a model: F, I and W of a stage take 1 unit of time and save 1 byte.

    Other numbers of stages share the same work evenly.
    """
    own, ones = _order(schedule), (1.0,) * schedule.n_stages
    costs = {schedule.n_stages: StageCosts(ones, ones, ones, ones, (0.0,) * schedule.n_stages)}
    counts = sorted({*_DEVICES, schedule.n_devices})
    for n_stages in sorted({chunks * count for count in counts for chunks in (1, 2)} - {schedule.n_stages}):
        costs[n_stages] = _even(costs[schedule.n_stages], n_stages)
    return _with_orders(own, costs, counts)


def _with_orders(own: Order, costs: dict[int, StageCosts], devices: Sequence[int]) -> WhatIf:
    orders = [own, *(order for order in _orders(own, devices) if len(order.placement) in costs)]
    return WhatIf(own, own.microbatches, costs, tuple(orders))


def _order(schedule: Schedule) -> Order:
    csv = schedule.to_csv()
    return Order(schedule.name, schedule.n_devices, schedule.n_microbatches, schedule.placement, csv)


def _orders(own: Order, devices: Sequence[int]) -> Iterator[Order]:
    """Yield the catalogue for these numbers of devices and several of micro-batches, up to the largest product."""
    for p, m in sorted({(p, m) for p in devices for m in (*_MICROBATCHES, own.microbatches)}):
        is_own = (p, m) == (own.devices, own.microbatches)
        if p * m <= (_MOST_OF_OWN if is_own else _MOST):
            yield from (order for order in _catalogue(p, m) if _key(order) != _key(own))


def _key(order: Order) -> tuple[str, int, int, int]:
    return order.name, order.devices, order.microbatches, len(order.placement)


@lru_cache(maxsize=64)
def _catalogue(n_devices: int, n_microbatches: int) -> tuple[Order, ...]:
    """Return every schedule at one stage per device, or at two for schedules that gain by several stages per device."""
    orders = []
    for name, entry in CATALOGUE.items():
        chunks = entry.chunks or (1 if name == "gpipe" else 2)
        if not entry.compared:
            continue
        try:
            orders.append(_order(build_schedule(name, chunks * n_devices, n_microbatches, n_devices=n_devices)))
        except ScheduleError:  # a builder of the user may need other numbers
            continue
    return tuple(orders)


def _planned(plan: Plan, transfer: dict[str, float]) -> StageCosts:
    sent = [sum(transfer.get(r.value, 0.0) for r in plan.routes if r.source == s) for s in range(plan.n_stages)]
    rows = (
        (s.forward, s.backward - w, w, s.saved_bytes) for s in plan.stages for w in (min(s.weight_grad, s.backward),)
    )
    forward, inward, weight, saved = zip(*rows, strict=True)
    return StageCosts(forward, inward, weight, saved, tuple(sent))


def _cut_anew(plan: Plan, problem: Problem, n_stages: int) -> StageCosts | None:
    """Return the costs of the graph cut into `n_stages` stages, without limits and constraints; None if it cannot be cut so.

    The problem has one time per node. That time is divided into forward and backward as in the node's stage of the plan.
    """
    unlimited = replace(problem, memory_limit=None, in_flight=None, recompute=None)
    free = replace(unlimited, speed=None, links=None, placement=None, pins={}, apart=())
    try:
        stage_of = partition(free, n_stages, method="dp", time_limit=2.0).stage_of
    except (PartitionError, VerifyError):
        return None
    if len(set(stage_of.values())) < n_stages:
        return None
    return _summed(plan, problem, stage_of, n_stages)


def _summed(plan: Plan, problem: Problem, stage_of: Mapping[str, int], n_stages: int) -> StageCosts:
    """Return the costs of the stages, summed over the nodes and tensors of the problem."""
    ahead = [stage.forward / ((stage.forward + stage.backward) or 1.0) for stage in plan.stages]
    forward, back, saved, sent = ([0.0] * n_stages for _ in range(4))
    for node in problem.nodes:
        stage, part = stage_of[node.name], ahead[plan.stage_of[node.name]]
        forward[stage] += node.time * part
        back[stage] += node.time * (1 - part) / 2
        saved[stage] += node.activation
    for tensor in problem.tensors:
        source = stage_of[tensor.source]
        if any(stage_of[consumer] > source for consumer in tensor.consumers):
            sent[source] += tensor.time / 2
    return StageCosts(tuple(forward), tuple(back), tuple(back), tuple(saved), tuple(sent))


def _even(known: StageCosts, n_stages: int) -> StageCosts:
    """Return the same work in `n_stages` equal stages. A transfer takes the mean of the known transfers."""
    forward, input_grad, weight_grad, saved = (
        (sum(each) / n_stages,) * n_stages for each in (known.forward, known.input_grad, known.weight_grad, known.saved)
    )
    mean = sum(known.transfer) / max(1, len(known.transfer) - 1)
    return StageCosts(forward, input_grad, weight_grad, saved, (mean,) * (n_stages - 1) + (0.0,))
