"""Stand-ins for numbers that change between steps: arithmetic on them becomes nodes, so that every run computes with the present number.

    h / self.temperature               read("model.temperature") ──► h / number       a node of a size, in each stage that needs it
    math.exp(-self.step / 100)         three such nodes
    if self.step > 1000:               a condition: the recording is right while the comparison has this answer
    range(self.n)   x.view(self.n)     NotLiftedError: the recording needs the number itself, so the piece around is kept whole

The classes derive from torch's symbolic numbers, since torch accepts these wherever it accepts numbers. They have no node of torch's, so
that any use which is not provided for here fails.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pipecompile.errors import TraceError
from pipecompile.text.shown_value import type_text
from pipecompile.tracing.message_text import is_in_message
from pipecompile.tracing.node_facts import NodeFacts, Role, set_facts
from pipecompile.tracing.user_source import caller

__all__ = [
    "Comparison",
    "LiftedFloat",
    "LiftedInt",
    "LiftedNumber",
    "NotLiftedError",
    "examples",
    "lifted",
    "lifted_in",
]


class NotLiftedError(TraceError):
    """A recording needs a number itself, which changes between steps. `labels` are those of the number's parts."""

    def __init__(self, number: LiftedNumber, why: str) -> None:
        self.labels = number.labels
        super().__init__(f"cannot trace: {number.text} changes between steps, and {why}", code="PC199", where=caller())


class LiftedNumber:
    """The number `function(*args)`, computed anew at every run. `number` is its value while recording."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    number: Any
    comparisons: dict[str, Comparison]

    def now(self) -> Any:
        """Return the present number."""
        return self.function(*(one.now() if isinstance(one, LiftedNumber) else one for one in self.args))

    def graph_node(self, graph: fx.Graph, known: dict[int, Any]) -> fx.Node:
        """Return the node that computes the number. `known` has (number, node) of those that have a node, by id."""
        if id(self) not in known:
            args = tuple(one.graph_node(graph, known) if isinstance(one, LiftedNumber) else one for one in self.args)
            node = graph.call_function(self.function, args)
            set_facts(node, NodeFacts(role=Role.SIZE), self.number)
            known[id(self)] = self, node
        node = known[id(self)][1]
        assert isinstance(node, fx.Node)
        return node

    @property
    def text(self) -> str:
        """The expression, for messages."""
        names = [one.text if isinstance(one, LiftedNumber) else str(one) for one in self.args]
        sign = _SIGNS.get(self.function)
        if self.function.__name__ == "lifted":
            return names[0]
        return f"({names[0]} {sign} {names[1]})" if sign else f"{self.function.__name__}({', '.join(names)})"

    @property
    def labels(self) -> frozenset[str]:
        """The labels of the numbers of the model that the number is computed from."""
        if self.function.__name__ == "lifted":
            return frozenset(self.args)
        return frozenset().union(*(one.labels for one in self.args if isinstance(one, LiftedNumber)))

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], number: Any, comparisons: Any) -> None:
        self.function, self.args, self.number, self.comparisons = function, args, number, comparisons

    def _constant(self, *_: Any) -> Any:
        raise NotLiftedError(self, "is needed as a constant")

    __hash__ = _constant
    __float__ = __int__ = __index__ = __complex__ = __array__ = _constant

    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))

    def __str__(self) -> str:
        return str(self.number) if is_in_message(sys._getframe(1)) else self._constant()

    __repr__ = __str__

    def __format__(self, specification: str) -> str:
        return format(self.number, specification) if is_in_message(sys._getframe(1)) else self._constant()

    def __round__(self, digits: Any = None) -> Any:
        return lifted(round, self, digits) if digits is not None else lifted(round, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class LiftedFloat(LiftedNumber, torch.SymFloat):
    """A float that changes between steps."""


class LiftedInt(LiftedNumber, torch.SymInt):
    """An int that changes between steps."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of numbers, and the `answer` with which the recording went on. `place` is the user's line."""

    function: Callable[[Any, Any], bool]
    left: LiftedNumber
    right: Any
    answer: bool
    place: str

    def holds(self) -> bool:
        """Return whether the comparison of the present numbers has the same answer."""
        right = self.right.now() if isinstance(self.right, LiftedNumber) else self.right
        return self.function(self.left.now(), right) is self.answer

    def __str__(self) -> str:
        right = self.right.text if isinstance(self.right, LiftedNumber) else self.right
        return f"{self.left.text} {_SIGNS[self.function]} {right}"


def lifted(function: Callable[..., Any], *args: Any) -> Any:
    """Return the number `function(*args)`, lifted. Raise NotLiftedError if the result is neither an int nor a float."""
    number = function(*examples(args))
    cls = {float: LiftedFloat, int: LiftedInt}.get(type(number))
    first = next(one for one in args if isinstance(one, LiftedNumber))
    if cls is None:
        raise NotLiftedError(first, f"{function.__name__} makes {type_text(number)} of it")
    return cls(function, args, number, first.comparisons)


def lifted_in(structure: Any) -> Iterator[LiftedNumber]:
    """Yield the lifted numbers in nested arguments."""
    if isinstance(structure, LiftedNumber):
        yield structure
    elif isinstance(structure, (tuple, list)):
        for item in structure:
            yield from lifted_in(item)
    elif isinstance(structure, dict):
        yield from lifted_in(tuple(structure.values()))
    elif isinstance(structure, slice):
        yield from lifted_in((structure.start, structure.stop, structure.step))


def examples(structure: Any, change: Callable[[Any], Any] = lambda number: number) -> Any:
    """Return nested arguments with numbers instead of lifted numbers: `change` of those while recording."""
    if isinstance(structure, LiftedNumber):
        return change(structure.number)
    if not any(True for _ in lifted_in(structure)):
        return structure
    if isinstance(structure, dict):
        return {key: examples(item, change) for key, item in structure.items()}
    if isinstance(structure, slice):
        return slice(*(examples(part, change) for part in (structure.start, structure.stop, structure.step)))
    items = [examples(item, change) for item in structure]
    return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)


_NUMBERS = (int, float, LiftedNumber)
_SIGNS: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//", operator.mod: "%",
    operator.pow: "**", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda number, other: lifted(function, number, other) if isinstance(other, _NUMBERS) else NotImplemented


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda number, other: lifted(function, other, number) if isinstance(other, _NUMBERS) else NotImplemented


def _comparing(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def compare(number: LiftedNumber, other: Any) -> Any:
        if not isinstance(other, _NUMBERS):
            return NotImplemented
        found = Comparison(function, number, other, function(number.number, *examples((other,))), caller())
        return number.comparisons.setdefault(str(found), found).answer

    return compare


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(LiftedNumber, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(LiftedNumber, f"__r{_name}__", _reflected(getattr(operator, _name)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(LiftedNumber, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name, _function in {"neg": operator.neg, "pos": operator.pos, "abs": operator.abs, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}.items():  # fmt: skip
    setattr(LiftedNumber, f"__{_name}__", lambda number, function=_function: lifted(function, number))
