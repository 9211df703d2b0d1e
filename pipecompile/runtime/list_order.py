"""Lists that Python of several stages changes: their items come in the order of the cells, which may not be that of the plain loop.

loop         seen.append(h) of 0F0 1F0 0F1 1F1
schedule     seen.append(h) of 0F0 0F1 1F0 1F1      or in the order in which threads come to it
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import fx, nn

from pipecompile.errors import RecordingWarning
from pipecompile.graph.python_use import PythonUse, python_use
from pipecompile.ir import Kind, Program
from pipecompile.ir.directions import stage_devices
from pipecompile.ir.execution_order import Place
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.tracing.user_source import warn

__all__ = ["ListOrders"]


class ListOrders:
    """The lists of a program that hooks and pieces kept whole of several stages change. Warns once of one whose items come in another
    order than in the plain loop.
    """

    def __init__(self, program: Program, cells: Sequence[Cell | VariantCell]) -> None:
        self._program, self._cells, self._seen = program, cells, dict[bool, int]()
        self._variants = [cell for cell in cells if isinstance(cell, VariantCell)]

    def warn(self, inline: Callable[[], Sequence[Place]], *, threaded: bool) -> None:
        """Warn of a list, for a thread per device or for one thread, whose order `inline` returns: on ranks, with the cells of this
        rank alone. Recordings that were added are looked at.
        """
        count = sum(len(cell.all_effects) for cell in self._variants)
        if self._seen.get(threaded) == count:
            return
        self._seen[threaded] = count
        forwards = self._forwards(inline()) if sum(map(_runs_python, self._cells)) > 1 else []
        shared = self._shared({stage for _, stage in forwards})
        found = next(((n, stages) for n, stages in shared if not self._is_ordered(stages, forwards, threaded)), None)
        if found is not None:
            name, stages = found
            warn(_UNORDERED.format(", ".join(map(str, sorted(stages))), name, _ORDERS[threaded]), RecordingWarning)

    def _forwards(self, places: Sequence[Place]) -> list[tuple[int, int]]:
        """Return the (micro-batch, stage) of the forwards at these places."""
        actions = (self._program.rows[device][index].action for device, index in places)
        return [(one.microbatch, one.stage) for one in actions if one is not None and one.kind is Kind.FORWARD]

    def _shared(self, stages: Collection[int]) -> list[tuple[str, set[int]]]:
        """Return the lists that several of these stages change: the name, and which do."""
        names, changing = dict[int, str](), defaultdict[int, set[int]](set)
        for stage in stages:
            for use in (one for module in self._cells[stage].modules for one in _uses(module)):
                lists = {id(one): name for name in use.changed for one in use.lists(name).values() if _is_list(one)}
                names |= lists
                for key in lists:
                    changing[key].add(stage)
        return [(names[key], found) for key, found in changing.items() if len(found) > 1]

    def _is_ordered(self, stages: set[int], forwards: Sequence[tuple[int, int]], threaded: bool) -> bool:
        """Return whether the forwards of these stages run micro-batch by micro-batch, and stage by stage in each."""
        devices = stage_devices(self._program)
        if threaded and len(set().union(*(devices[stage] for stage in stages))) > 1:
            return False
        return all(a <= b for a, b in pairwise(one for one in forwards if one[1] in stages))


_UNORDERED = (
    "Python of stages {} changes {!r}, in the order {}: its items do not come in the order of the plain loop. Try a stage per device and"
    " dispatch='inline'; or append what belongs together in one layer"
)
_ORDERS = {False: "of the schedule", True: "in which threads come to it"}


def _runs_python(cell: Cell | VariantCell) -> bool:
    return any(one.runs_python for one in cell.all_effects)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, deque))


def _uses(module: nn.Module) -> Iterator[PythonUse]:
    """Yield the uses of the Python that a stage runs."""
    for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
        if node.op == "call_module" and (use := python_use(module.get_submodule(str(node.target)))) is not None:
            yield use
