"""Alternatives for the report: other numbers of devices and micro-batches, and other schedules, computed without the model.

    numbers of stages ──▶ the graph cut anew for each ──▶ costs per stage ─┐
                                                                          ├─▶ simulated in the page of the report
    numbers of devices and micro-batches ──▶ the catalogue's orders ──────┘

A cut takes some hundredths of a second, since it is solved by dynamic programming only. An order is a schedule as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from pipecompile.errors import PartitionError, ScheduleError, VerifyError
from pipecompile.ir import HOST, Schedule
from pipecompile.ir.directions import check_one_direction
from pipecompile.ir.plan import Plan
from pipecompile.ir.slices import check_whole
from pipecompile.ir.what_if import Order, RouteCosts, StageCosts, WhatIf
from pipecompile.partitioners import Problem, partition
from pipecompile.schedules import CATALOGUE, build_schedule

__all__ = ["unit_what_if", "what_if"]

_DEVICES, _MICROBATCHES = (2, 4, 8, 16), (4, 8, 16, 32, 64)
_MOST, _MOST_OF_OWN = 256, 1024
"""Largest product of devices and micro-batches whose catalogue goes into the page: 240 bytes each, 400 KB in all."""


RoutesOf = Callable[[Mapping[str, int], int], Sequence[RouteCosts]]
"""From the stage of every node and the number of stages to the costs of what crosses."""


def what_if(
    plan: Plan,
    problem: Problem | None,
    schedule: Schedule,
    routes: Sequence[RouteCosts],
    routes_of: RoutesOf,
    *,
    overlaps: bool = False,
) -> WhatIf:
    """Return the alternatives to a plan with these `routes`; those of another cut are `routes_of` it.

    Without a problem, other numbers of stages share the work evenly.
    """
    own = _order(schedule)
    costs = {plan.n_stages: _planned(plan, routes)}
    counts = sorted({*_DEVICES, schedule.n_devices})
    for n_stages in sorted({chunks * count for count in counts for chunks in (1, 2)} - {plan.n_stages}):
        if problem is None:
            cut: StageCosts | None = _even(costs[plan.n_stages], n_stages)
        else:
            cut = _cut_anew(plan, problem, n_stages, routes_of)
        if cut is not None:
            costs[n_stages] = cut
    return replace(_with_orders(own, costs, counts), overlaps=overlaps)


def unit_what_if(schedule: Schedule) -> WhatIf:
    """Return the alternatives to a schedule without a model: F, I and W of a stage take 1 unit of time and save 1 byte.

    Other numbers of stages share the same work evenly. Raise ScheduleError for a schedule of slices, which the page cannot simulate.
    """
    check_whole(schedule, "the page of the report simulates whole micro-batches")
    check_one_direction(schedule, "the page of the report simulates one")
    own, ones, n_stages = _order(schedule), (1.0,) * schedule.n_stages, schedule.n_stages
    costs = {n_stages: StageCosts(ones, (2.0,) * n_stages, ones, ones, ones, ones, _chain(n_stages))}
    counts = sorted({*_DEVICES, schedule.n_devices})
    for count in sorted({chunks * count for count in counts for chunks in (1, 2)} - {n_stages}):
        costs[count] = _even(costs[n_stages], count)
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
            yield from (order for order in _catalogue(p, m, tuple(CATALOGUE)) if _key(order) != _key(own))


def _key(order: Order) -> tuple[str, int, int, int]:
    return order.name, order.devices, order.microbatches, len(order.placement)


@lru_cache(maxsize=64)
def _catalogue(n_devices: int, n_microbatches: int, names: tuple[str, ...]) -> tuple[Order, ...]:
    """Return every schedule of these names at one stage per device, or at two for schedules that gain by several stages per device."""
    orders = []
    for name in names:
        entry = CATALOGUE[name]
        chunks = entry.chunks or (1 if name == "gpipe" else 2)
        if not entry.compared:
            continue
        try:
            schedule = build_schedule(name, chunks * n_devices, n_microbatches, n_devices=n_devices)
        except ScheduleError:  # a builder of the user may need other numbers
            continue
        if not schedule.directions:
            orders.append(_order(schedule))
    return tuple(orders)


def _planned(plan: Plan, routes: Sequence[RouteCosts]) -> StageCosts:
    stages = plan.stages
    held = [stage.held_bytes for stage in stages]
    return StageCosts(
        forward=tuple(stage.forward for stage in stages),
        backward=tuple(stage.backward for stage in stages),
        input_grad=tuple(stage.input_grad for stage in stages),
        weight_grad=tuple(stage.weight_grad for stage in stages),
        saved=tuple(held),
        kept=tuple(
            h if s.weight_saved_bytes is None else s.weight_saved_bytes for s, h in zip(stages, held, strict=True)
        ),
        routes=tuple(routes),
    )


def _cut_anew(plan: Plan, problem: Problem, n_stages: int, routes_of: RoutesOf) -> StageCosts | None:
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
    return _summed(plan, problem, stage_of, routes_of(stage_of, n_stages), n_stages)


def _summed(
    plan: Plan, problem: Problem, stage_of: Mapping[str, int], routes: Sequence[RouteCosts], n_stages: int
) -> StageCosts:
    """Return the costs of the stages, summed over the nodes of the problem. A stage keeps what it receives until its backward."""
    ahead = [stage.forward / ((stage.forward + stage.backward) or 1.0) for stage in plan.stages]
    forward, back, saved = ([0.0] * n_stages for _ in range(3))
    for node in problem.nodes:
        stage, part = stage_of[node.name], ahead[plan.stage_of[node.name]]
        forward[stage] += node.time * part
        back[stage] += node.time * (1 - part)
        saved[stage] += node.activation
    for route in routes:
        for end in route.ends if route.gradient and route.source != HOST else ():
            saved[end] += route.nbytes * (end != HOST)
    half, held = tuple(seconds / 2 for seconds in back), tuple(saved)
    return StageCosts(tuple(forward), tuple(back), half, half, held, held, tuple(routes))


def _even(known: StageCosts, n_stages: int) -> StageCosts:
    """Return the same work in `n_stages` equal stages, each of which sends the mean of the known values to the next."""
    crossing = [route for route in known.routes if HOST not in (route.source, *route.ends)]
    count = max(1, len(known.forward) - 1)
    seconds, nbytes = (sum(getattr(r, name) for r in crossing) / count for name in ("seconds", "nbytes"))

    def evenly(values: Sequence[float]) -> tuple[float, ...]:
        return (sum(values) / n_stages,) * n_stages

    return StageCosts(
        forward=evenly(known.forward),
        backward=evenly(known.backward),
        input_grad=evenly(known.input_grad),
        weight_grad=evenly(known.weight_grad),
        saved=evenly(known.saved),
        kept=evenly(known.kept),
        routes=_chain(n_stages, nbytes, seconds),
    )


def _chain(n_stages: int, nbytes: float = 0.0, seconds: float = 0.0) -> tuple[RouteCosts, ...]:
    return tuple(RouteCosts(s, (s + 1,), nbytes, True, seconds) for s in range(n_stages - 1))
