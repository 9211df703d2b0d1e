"""Lists that Python of several stages changes: their items come in the order of the cells, which may not be that of the plain loop.

loop         seen.append(h) of 0F0 1F0 0F1 1F1
schedule     seen.append(h) of 0F0 0F1 1F0 1F1      or in the order in which threads come to it
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

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
        """Warn of a list, for a thread per device or for one thread, whose order `inline` returns. Recordings that were added are looked at."""
        count = sum(len(cell.all_effects) for cell in self._variants)
        if self._seen.get(threaded) == count:
            return
        self._seen[threaded] = count
        shared = self._shared() if sum(map(_runs_python, self._cells)) > 1 else {}
        found = next(((name, s) for name, s in shared.items() if not self._is_ordered(s, inline, threaded)), None)
        if found is not None:
            name, stages = found
            warn(_UNORDERED.format(", ".join(map(str, sorted(stages))), name, _ORDERS[threaded]), RecordingWarning)

    def _shared(self) -> dict[str, set[int]]:
        """Return, by name, the stages that change the same list."""
        changing, names = defaultdict[int, set[int]](set), dict[int, str]()
        for stage, cell in enumerate(self._cells):
            for use in (one for module in cell.modules for one in _uses(module)):
                for name in use.changed:
                    for key in (key for key, held in use.lists(name).items() if isinstance(held, (list, deque))):
                        changing[key].add(stage)
                        names[key] = name
        return {names[key]: stages for key, stages in changing.items() if len(stages) > 1}

    def _is_ordered(self, stages: set[int], inline: Callable[[], Sequence[Place]], threaded: bool) -> bool:
        """Return whether the forwards of these stages run micro-batch by micro-batch, and stage by stage in each. On ranks `inline` has the
        cells of this rank alone.
        """
        devices, rows = stage_devices(self._program), self._program.rows
        if threaded and len(set().union(*(devices[stage] for stage in stages))) > 1:
            return False
        actions = (rows[device][index].action for device, index in inline())
        forwards = [(one.microbatch, one.stage) for one in actions if one is not None and one.kind is Kind.FORWARD]
        return all(a <= b for a, b in pairwise(one for one in forwards if one[1] in stages))


_UNORDERED = (
    "Python of stages {} changes {!r}, in the order {}: its items do not come in the order of the plain loop. Try a stage per device and"
    " dispatch='inline'; or append what belongs together in one layer"
)
_ORDERS = {False: "of the schedule", True: "in which threads come to it"}


def _runs_python(cell: Cell | VariantCell) -> bool:
    return any(one.runs_python for one in cell.all_effects)


def _uses(module: nn.Module) -> Iterator[PythonUse]:
    """Yield the uses of the Python that a stage runs."""
    for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
        if node.op == "call_module" and (use := python_use(module.get_submodule(str(node.target)))) is not None:
            yield use
