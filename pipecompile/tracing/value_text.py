"""The text of a value in a traced graph: tensors, symbolic sizes, containers and constants as Python expressions.

    float32[s77, 4]     s77*4     (a, [b, 1], {'k': torch.int64})     slice(None, 3, None)     named('mymodel.Config')

The grammar is in `graph_text`.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
import torch
from sympy.printing.str import StrPrinter
from torch import fx

from pipecompile.tracing.qualified_names import qualified

__all__ = ["ValuePrinter", "expression_text", "field", "quoted"]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_BARE = re.compile(r"[^\s|'\"\\(),:=][^|'\"\\\n]*")


class _Printer(StrPrinter):  # type: ignore[misc]
    """Sympy's own text, with `and` and `or` as functions: "|" separates the fields of a line."""

    def _print_And(self, expression: sympy.And) -> str:  # noqa: N802 - sympy's name
        return f"And({', '.join(map(self._print, expression.args))})"

    def _print_Or(self, expression: sympy.Or) -> str:  # noqa: N802 - sympy's name
        return f"Or({', '.join(map(self._print, expression.args))})"

    def _print_Not(self, expression: sympy.Not) -> str:  # noqa: N802 - sympy's name
        return f"Not({self._print(expression.args[0])})"


def expression_text(expression: sympy.Basic) -> str:
    """Return the text of an expression in the symbols of a graph."""
    return str(_Printer().doprint(expression))


def field(text: str) -> str:
    """Return `text` as one field of a line: bare if possible, else a Python string without "|"."""
    is_bare = _BARE.fullmatch(text) and text.isprintable() and text == text.strip()
    return text if is_bare else quoted(text)


def quoted(value: object) -> str:
    """Return the repr of a value, without "|"."""
    return repr(value).replace("|", "\\x7c")


class ValuePrinter:
    """Prints the values of one graph, which was recorded on `device`; collects in `symbols` an example per symbol."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.symbols: dict[str, int] = {}

    def text(self, value: Any) -> str:
        """Return an argument or value as a Python expression."""
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, torch.Tensor):
            return self.tensor(value, self.device)
        if isinstance(value, _SYMBOLIC):
            return self._symbolic(value)
        if isinstance(value, (tuple, list, dict, slice)) and (contained := self._container(value)):
            return contained
        if isinstance(value, torch.device):
            return f"device({str(value)!r})"
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if value is Ellipsis:
            return "..."
        return quoted(value) if type(value) in _PLAIN else f"named({qualified(value)!r})"

    def tensor(self, value: torch.Tensor, device: torch.device | None = None, *, grad: bool = False) -> str:
        """Return dtype and shape; with `device`, also the device of a tensor elsewhere; with `grad`, whether a gradient is required."""
        sizes = ", ".join(map(self._size, value.shape)) or "()"
        text = f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
        text += f".on({str(value.device)!r})" if device is not None and value.device != device else ""
        return text + ".grad" * (grad and value.requires_grad)

    def _container(self, value: Any) -> str:
        """Return the text of a tuple, slice, list or dict; nothing for a list or dict of the user's class."""
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.text, (value.start, value.stop, value.step)))})"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.text, value))}{',' * (len(value) == 1)})"
        if type(value) in (list, fx.immutable_collections.immutable_list):
            return f"[{', '.join(map(self.text, value))}]"
        if type(value) in (dict, fx.immutable_collections.immutable_dict):
            return f"{{{', '.join(f'{self.text(key)}: {self.text(item)}' for key, item in value.items())}}}"
        return ""

    def _symbolic(self, value: Any) -> str:
        if isinstance(value, torch.SymInt):
            return self._size(value)
        return f"{'float' if isinstance(value, torch.SymFloat) else 'bool'}({expression_text(value.node.expr)})"

    def _size(self, size: Any) -> str:
        """Return the text of a size, and note the example of a size that is a symbol."""
        if not isinstance(size, torch.SymInt):
            return str(size)
        expression = size.node.expr
        if isinstance(expression, sympy.Symbol) and size.node.hint is not None:
            self.symbols.setdefault(expression.name, int(size.node.hint))
        return expression_text(expression)
