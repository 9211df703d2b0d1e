"""The order in which a stage runs its forwards, compared with that of the plain loop: what forwards write comes out in that order.

loop         0F0 0F1 0F2        running_mean after micro-batches 0, 1, 2: the last one counts most
schedule     0F1 0F0 0F2        the same mean of other weights
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipecompile.ir import Action, Kind
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell

__all__ = ["Order", "order_warning", "orders_unlike_the_loop"]

Order = tuple[int, ...] | None
"""The order in which a stage runs the forwards of micro-batches. None if it has copies in several threads, and so no order."""

_SHOWN = 6
"""Micro-batches of an order that a warning shows."""


def orders_unlike_the_loop(actions: Iterable[Action], places: Mapping[int, int]) -> dict[int, Order]:
    """Return the orders of the stages that do not run the forwards of micro-batches as the plain loop does. `actions` are in the order in
    which they run, at least those of one stage. `places` has, by stage, the number of threads that run it.
    """
    orders: dict[int, list[int]] = {}
    for one in actions:
        if one.kind is Kind.FORWARD:
            orders.setdefault(one.stage, []).append(one.microbatch)
    apart = {stage for stage, count in places.items() if count > 1}
    found = {stage: None if stage in apart else tuple(order) for stage, order in sorted(orders.items())}
    return {stage: order for stage, order in found.items() if order is None or list(order) != sorted(order)}


def order_warning(orders: Mapping[int, Order], cells: Sequence[Cell | VariantCell], names: Mapping[int, str]) -> str:
    """Return a warning if a stage with one of these orders writes state; "" if none does. `names` are those of the buffers that count, by
    id.
    """
    for stage, order in orders.items():
        if written := _written(cells[stage], names):
            shown = "in which threads come to them" if order is None else ", ".join(map(str, order[:_SHOWN]))
            more = ", ..." * (order is not None and len(order) > _SHOWN)
            return (
                f"stage {stage} runs the forwards of micro-batches in the order {shown}{more}, and writes {written}: what it leaves is not what"
                " the plain loop leaves. Try a schedule that runs micro-batches in order; or, for BatchNorm, batch_norm='deferred'"
            )
    return ""


def _written(cell: Cell | VariantCell, names: Mapping[int, str]) -> str:
    """Return what the forwards of a stage write, or "" if that is nothing."""
    effects = cell.all_effects
    buffers = [names[id(one)] for each in effects for one in each.written_buffers if id(one) in names]
    others = any(one.places or one.runs_python for one in effects)
    found = [*dict.fromkeys(buffers), *["what its hooks and pieces kept whole leave"] * others]
    return ", ".join(found[:2]) + ", ..." * (len(found) > 2)
