"""The order in which a stage runs its forwards, compared with the plain loop: running statistics depend on it.

loop         0F0 0F1 0F2        running_mean after micro-batches 0, 1, 2: the last one counts most
schedule     0F1 0F0 0F2        the same mean of other weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pipecompile.errors import RecordingWarning
from pipecompile.ir import Action, Kind, Program
from pipecompile.ir.directions import stage_devices
from pipecompile.ir.execution_order import Place
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.torch_private.storages import memory_state
from pipecompile.tracing.state.change_log import StateHolders
from pipecompile.tracing.state.snapshot import has_content
from pipecompile.tracing.user_source import warn

__all__ = ["ForwardOrders"]

Order = tuple[int, ...] | None
"""The order in which a stage runs the forwards of micro-batches. None if it has copies in several threads, and so no order."""

_SHOWN = 6
"""Micro-batches of an order that a warning shows."""


class ForwardOrders:
    """The stages of a program that do not run the forwards of micro-batches as the plain loop does: in one thread, and in a thread per
    device. Warns once if such a stage, or the loss behind it, writes state.
    """

    def __init__(self, program: Program, cells: Sequence[Cell | VariantCell]) -> None:
        self._program, self._cells = program, cells
        self._found: dict[bool, dict[int, Order]] = {}
        self._looked_at: dict[bool, int] = {}  # recordings of stages, which a list of micro-batches adds to

    def warn_of_stages(
        self, names: Callable[[], Mapping[int, str]], inline: Callable[[], Sequence[Place]], *, threaded: bool
    ) -> None:
        """Warn if such a stage writes state. `names` returns the names of the buffers that count, by id, and `inline` the order of one
        thread.
        """
        if threaded not in self._found:
            self._found[threaded] = self._orders(inline, threaded=threaded)
        count = sum(len(cell.all_effects) for cell in self._cells) if self._found[threaded] else 0
        if self._found[threaded] and self._looked_at.get(threaded) != count:
            self._looked_at[threaded], counted = count, names()
            written = ((stage, _written(self._cells[stage], counted)) for stage in self._found[threaded])
            self._warn(next((pair for pair in written if pair[1]), None), threaded=threaded)

    @contextmanager
    def loss_watched(self, *, threaded: bool) -> Iterator[None]:
        """Warn if the loss writes state while the block runs the program, and the last stage is such a stage."""
        last, effects = len(self._cells) - 1, self._cells[-1].all_effects if self._cells else ()
        is_watched = last in self._found.get(threaded, {}) and any(one.loss is not None for one in effects)
        watched = [_Contents(one.state_holders) for one in effects] if is_watched else []
        yield
        if any(one.has_changed() for one in watched):
            self._warn((last, "what the loss leaves"), threaded=threaded)

    def _warn(self, found: tuple[int, str] | None, *, threaded: bool) -> None:
        if found is None:
            return
        stage, written = found
        order = self._found[threaded][stage]
        shown = "in which threads come to them" if order is None else ", ".join(map(str, order[:_SHOWN]))
        more = ", ..." * (order is not None and len(order) > _SHOWN)
        self._found[threaded] = {}
        warn(
            f"stage {stage} runs the forwards of micro-batches in the order {shown}{more}, and writes {written}: what it leaves is not what"
            " the plain loop leaves. Try a schedule that runs micro-batches in order; or, for BatchNorm, batch_norm='deferred'",
            RecordingWarning,
        )

    def _orders(self, inline: Callable[[], Sequence[Place]], *, threaded: bool) -> dict[int, Order]:
        """Return the orders unlike that of the loop. Copies of a stage run in the order of one thread, or have a thread each."""
        rows, has_copies = self._program.rows, bool(self._program.directions)
        rowwise = ((d, i) for d, row in enumerate(rows) for i in range(len(row)))
        places = inline() if has_copies and not threaded else rowwise
        orders = _orders_of(action for d, i in places if (action := rows[d][i].action) is not None)
        apart = {s for s, devices in enumerate(stage_devices(self._program)) if threaded and len(devices) > 1}
        found = {stage: None if stage in apart else order for stage, order in sorted(orders.items())}
        return {stage: order for stage, order in found.items() if order is None or list(order) != sorted(order)}


class _Contents:
    """The state near a loss, to compare with later."""

    def __init__(self, holders: StateHolders) -> None:
        self._holders, self._containers, self._bindings = holders, holders.contents(), holders.bindings()
        self._tensors = [(one, memory_state(one)) for one in holders.tensors()]

    def has_changed(self) -> bool:
        """Return whether a container, a tensor or a name outside is not as it was."""
        containers = any(not has_content(*one) for one in self._containers)
        tensors = any(memory_state(one) != before for one, before in self._tensors)
        return containers or tensors or bool(self._holders.rebound(self._bindings))


def _orders_of(actions: Iterable[Action]) -> dict[int, tuple[int, ...]]:
    """Return, by stage, the order of its forwards. `actions` are in the order in which they run, at least those of one stage."""
    orders: dict[int, list[int]] = {}
    for one in actions:
        if one.kind is Kind.FORWARD:
            orders.setdefault(one.stage, []).append(one.microbatch)
    return {stage: tuple(order) for stage, order in orders.items()}


def _written(cell: Cell | VariantCell, names: Mapping[int, str]) -> str:
    """Return a text for what the forwards of a stage write; "" if they write nothing."""
    effects = cell.all_effects
    buffers = [names[id(one)] for each in effects for one in each.written_buffers if id(one) in names]
    others = any(one.leaves_values for one in effects)
    found = [*dict.fromkeys(buffers), *["what its hooks and pieces kept whole leave"] * others]
    return ", ".join(found[:2]) + ", ..." * (len(found) > 2)
