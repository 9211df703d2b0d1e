"""What Python's own functions say about sizes and tensors while a model is recorded: what they would say in eager.

A size that depends on the batch is a symbol, and a tensor is a stand-in. Where a number can stay a symbol it does; where
Python must have the number itself (text, hash), the recording becomes right for this batch size alone.

    len(x)  max(a, b)  divmod(a, b)  math.sqrt(n)  int(n / 2)  float(n)        stay symbols
    isinstance(n, int)  isinstance(x, MyTensor)  type(x) is torch.Tensor       are true where they are true in eager
    f"{n}"  {n: ...}                                                           bind the batch size; print(n) and messages do not
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

import sympy
import torch

from pipecompile.torch_private.modes import FakeTensor
from pipecompile.torch_private.operators import symbolic_function
from pipecompile.torch_private.symbols import FloatTrueDiv, FloorDiv, IntTrueDiv, ToFloat
from pipecompile.tracing.interception.messages import for_people
from pipecompile.tracing.user_source import called_by_user

__all__ = ["QUESTIONS", "calls"]

_ORDINARY: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
"""A symbolic number answers as this one does."""

_MATH = "sqrt exp log log2 sin cos tan sinh cosh tanh asin acos atan".split()


def _is_symbol(value: object) -> bool:
    return type(value) in _ORDINARY


def _len(listener: Any, original: Any) -> Any:
    def length(value: Any) -> Any:
        if type(value) is FakeTensor and listener.listening and value.dim():
            return value.shape[0]
        if id(value) in listener.remains.lists:
            listener.remains.asks_length(value)
        return original(value)

    return length


def _isinstance(listener: Any, original: Any) -> Any:
    """It is asked a million times in a recording, nearly always of something else."""

    def instance(value: Any, kinds: Any) -> Any:
        answer = original(value, kinds)
        if answer or type(value) not in _STAND_INS or not listener.listening or not called_by_user():
            return answer
        if _is_symbol(value):
            return original(_ORDINARY[type(value)], kinds)
        kind = listener.kind(value)
        return kind not in (torch.Tensor, torch.nn.Parameter) and issubclass(kind, kinds)

    return instance


_STAND_INS = frozenset((*_ORDINARY, FakeTensor))


def _extreme(symbolic: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def make(listener: Any, original: Any) -> Any:
        def extreme(*args: Any, **kwargs: Any) -> Any:
            values = args if len(args) > 1 else args[0] if args and isinstance(args[0], (tuple, list)) else ()
            if kwargs or not any(map(_is_symbol, values)) or not listener.listening:
                return original(*args, **kwargs)
            return reduce(symbolic, values)

        return extreme

    return make


def _math(name: str) -> Callable[[Any, Any], Any]:
    symbolic = symbolic_function(name)

    def make(listener: Any, original: Any) -> Any:
        def function(value: Any, *rest: Any) -> Any:
            if symbolic is not None and not rest and _is_symbol(value) and listener.listening:
                return symbolic(value)
            return original(value, *rest)

        return function

    return make


def _print(listener: Any, original: Any) -> Any:
    def show(*args: Any, **kwargs: Any) -> Any:
        return original(*(map(_example, args) if listener.listening else args), **kwargs)

    return show


def _example(value: Any) -> Any:
    """Sizes as the numbers that they are in the example."""
    if isinstance(value, torch.Size):
        return torch.Size(map(_example, value))
    return value.node.hint if _is_symbol(value) else value


def _text(listener: Any, original: Any) -> Any:
    """Messages of torch show the symbol."""
    return lambda number: str(_told(number)) if listener.listening and called_by_user() else original(number)


def _format(_listener: Any, _original: Any) -> Any:
    return lambda number, specification: format(_told(number), specification)


def _told(number: Any) -> Any:
    """The number itself, or for a message the one of the example."""
    return _example(number) if for_people(sys._getframe(2)) else number.node.pytype(number)


def _hash(listener: Any, original: Any) -> Any:
    return lambda number: hash(int(number)) if listener.listening else original(number)


def _array(_listener: Any, _original: Any) -> Any:
    def array(number: Any, dtype: Any = None, copy: Any = None) -> Any:  # noqa: ARG001 (numpy passes it by name)
        import numpy as np  # only whom numpy asks

        return np.asarray(number.node.pytype(number), dtype)

    return array


def _divmod(_listener: Any, _original: Any) -> Any:
    return lambda number, other: (number // other, number % other)


def _rdivmod(_listener: Any, _original: Any) -> Any:
    return lambda number, other: (other // number, other % number)


_TEXTS = (("__repr__", _text), ("__format__", _format), ("__array__", _array))

QUESTIONS: tuple[tuple[Any, str, Callable[[Any, Any], Any]], ...] = (
    (builtins, "len", _len),
    (builtins, "isinstance", _isinstance),
    (builtins, "max", _extreme(torch.sym_max)),
    (builtins, "min", _extreme(torch.sym_min)),
    (builtins, "print", _print),
    (torch.SymInt, "__hash__", _hash),
    *((kind, name, make) for kind in (torch.SymInt, torch.SymFloat) for name, make in _TEXTS),
    (torch.SymInt, "__divmod__", _divmod),
    (torch.SymInt, "__rdivmod__", _rdivmod),
    *((math, name, _math(name)) for name in _MATH),
)


def _whole(number: Any) -> Any:
    """`int(number)`; of a quotient of sizes as `//`, which shapes can be computed with."""
    expression = sympy.sympify(number.node.expr)
    if isinstance(expression, (FloatTrueDiv, IntTrueDiv)):
        size, divisor = (part.args[0] if isinstance(part, ToFloat) else part for part in expression.args)
        if (
            size.is_integer
            and size.is_nonnegative
            and divisor.is_number
            and divisor > 0
            and float(divisor).is_integer()
        ):
            whole = FloorDiv(size, sympy.Integer(int(divisor)))
            return number.node.shape_env.create_symintnode(whole, hint=int(number.node.hint))
    return torch.sym_int(number)


def calls(listener: Any) -> dict[str, Callable[..., Any]]:
    """What calls of these builtins are led to; nobody else can stand in for a type."""

    def to_int(*args: Any, **kwargs: Any) -> Any:
        return _whole(args[0]) if args and _is_symbol(args[0]) else int(*args, **kwargs)

    def to_float(*args: Any) -> Any:
        return torch.sym_float(args[0]) if args and _is_symbol(args[0]) else float(*args)

    def kind(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) in _STAND_INS and listener.listening:
            return type(_ORDINARY[type(args[0])]) if _is_symbol(args[0]) else listener.kind(args[0])
        return type(*args, **kwargs)

    return {"int": to_int, "float": to_float, "type": kind}
