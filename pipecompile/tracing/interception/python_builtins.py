"""Python's own functions, patched while a model is recorded so that they answer about sizes and tensors as in eager mode.

A size that depends on the batch is a symbol, and a tensor is a fake one. Where a number can stay a symbol it does. Where
Python must have the number itself (text, hash), the recording is right for this batch size alone.

    len(x)  max(a, b)  divmod(a, b)  math.sqrt(n)  int(n / 2)  float(n)        stay symbols
    isinstance(n, int)  isinstance(x, MyTensor)  type(x) is torch.Tensor       are true where they are true in eager mode
    table[f"head_{n}"]  {n: ...}                                               fix the batch size

A text that is only a message does not decide what is computed. It shows the example's number and fixes nothing:

    print(n)  logger.warning(f"{n}")  raise ValueError(f"{n}")  assert ok, f"{n}"  torch._assert(ok, f"{x.shape}")
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
from pipecompile.tracing.fakes.lifted_numbers import LiftedFloat, LiftedInt, LiftedNumber, lifted
from pipecompile.tracing.message_text import is_in_message
from pipecompile.tracing.user_source import called_by_user, caller

__all__ = ["BUILTIN_PATCHES", "builtin_substitutes"]

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_EXAMPLES: dict[type, Any] = {**dict(zip(_SYMBOLS, (1, 1.0, True), strict=True)), LiftedInt: 1, LiftedFloat: 1.0}
"""Per type of a stand-in for a number, a value of the type that it has in eager mode."""

_STAND_INS = frozenset((*_EXAMPLES, FakeTensor))

_MATH = "sqrt exp log log2 sin cos tan sinh cosh tanh asin acos atan".split()


def _is_symbol(value: object) -> bool:
    return type(value) in _SYMBOLS


# -- patches: each takes the listener and the original, and returns the replacement ------------------------------------


def _len(listener: Any, original: Any) -> Any:
    def length(value: Any) -> Any:
        if type(value) is FakeTensor and listener.is_listening and value.dim():
            return value.shape[0]
        if id(value) in listener.leftovers.sized_containers:
            listener.leftovers.note_length_read(value)
        return original(value)

    return length


def _isinstance(listener: Any, original: Any) -> Any:
    """Return `isinstance` for stand-ins. It runs about a million times in a recording, nearly always on other values."""
    fake, stand_ins = FakeTensor, _STAND_INS

    def instance(value: Any, classes: Any) -> Any:
        if original(value, classes):
            if classes is fake and not listener.noticed_at and listener.is_listening and called_by_user():
                listener.noticed_at = caller()
            return True
        if type(value) not in stand_ins or not listener.is_listening or not called_by_user():
            return False
        if type(value) in _EXAMPLES:
            return original(_EXAMPLES[type(value)], classes)
        cls = listener.tensor_class(value)
        return cls not in (torch.Tensor, torch.nn.Parameter) and issubclass(cls, classes)

    return instance


def _extreme(symbolic: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the patch of `max` or `min`; `symbolic` computes it for two numbers."""

    def make(listener: Any, original: Any) -> Any:
        def extreme(*args: Any, **kwargs: Any) -> Any:
            values = args if len(args) > 1 else args[0] if args and isinstance(args[0], (tuple, list)) else ()
            if not kwargs and any(isinstance(one, LiftedNumber) for one in values):
                return lifted(original, *values)
            if kwargs or not any(map(_is_symbol, values)) or not listener.is_listening:
                return original(*args, **kwargs)
            return reduce(symbolic, values)

        return extreme

    return make


def _math(name: str) -> Callable[[Any, Any], Any]:
    """Return the patch of a function of `math`."""
    symbolic = symbolic_function(name)

    def make(listener: Any, original: Any) -> Any:
        def function(value: Any, *rest: Any) -> Any:
            if symbolic is not None and not rest and _is_symbol(value) and listener.is_listening:
                return symbolic(value)
            if type(value) is LiftedInt or type(value) is LiftedFloat:
                return lifted(original, value, *rest)
            return original(value, *rest)

        return function

    return make


def _print(listener: Any, original: Any) -> Any:
    def show(*args: Any, **kwargs: Any) -> Any:
        return original(*(map(_example, args) if listener.is_listening else args), **kwargs)

    return show


def _text(listener: Any, original: Any) -> Any:
    """Return `__repr__` of a symbolic number; messages of torch show the symbol."""
    return lambda number: str(_shown(number)) if listener.is_listening and called_by_user() else original(number)


def _format(_listener: Any, _original: Any) -> Any:
    return lambda number, specification: format(_shown(number), specification)


def _shown(number: Any) -> Any:
    """Return the number itself, or in a message the example's number. Call this from a patch that user code calls."""
    return _example(number) if is_in_message(sys._getframe(2)) else number.node.pytype(number)


def _example(value: Any) -> Any:
    """Return a size, or the sizes of a shape, as the numbers of the example."""
    if isinstance(value, torch.Size):
        return torch.Size(map(_example, value))
    if isinstance(value, LiftedNumber):
        return value.number
    return value.node.hint if _is_symbol(value) else value


def _hash(listener: Any, original: Any) -> Any:
    return lambda number: hash(int(number)) if listener.is_listening else original(number)


def _array(_listener: Any, _original: Any) -> Any:
    def array(number: Any, dtype: Any = None, copy: Any = None) -> Any:  # noqa: ARG001 (numpy passes it by name)
        import numpy as np  # only numpy calls this, so it is installed

        return np.asarray(number.node.pytype(number), dtype)

    return array


def _divmod(_listener: Any, _original: Any) -> Any:
    return lambda number, other: (number // other, number % other)


def _rdivmod(_listener: Any, _original: Any) -> Any:
    return lambda number, other: (other // number, other % number)


_TEXTS = (("__repr__", _text), ("__format__", _format), ("__array__", _array))

BUILTIN_PATCHES: tuple[tuple[Any, str, Callable[[Any, Any], Any]], ...] = (
    (builtins, "len", _len),
    (builtins, "isinstance", _isinstance),
    (builtins, "max", _extreme(torch.sym_max)),
    (builtins, "min", _extreme(torch.sym_min)),
    (builtins, "print", _print),
    (torch.SymInt, "__hash__", _hash),
    *((cls, name, make) for cls in (torch.SymInt, torch.SymFloat) for name, make in _TEXTS),
    (torch.SymInt, "__divmod__", _divmod),
    (torch.SymInt, "__rdivmod__", _rdivmod),
    *((math, name, _math(name)) for name in _MATH),
)
"""Owner, attribute, and the patch of the attribute."""


# -- int, float and type: types, so only their calls are redirected (`user_functions`) ---------------------------------


def builtin_substitutes(listener: Any) -> dict[str, Callable[..., Any]]:
    """Return what calls of `int`, `float` and `type` are redirected to."""

    def to_int(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], LiftedNumber):
            return lifted(int, *args)
        return _whole(args[0]) if args and _is_symbol(args[0]) else int(*args, **kwargs)

    def to_float(*args: Any) -> Any:
        if args and isinstance(args[0], LiftedNumber):
            return lifted(float, *args)
        return torch.sym_float(args[0]) if args and _is_symbol(args[0]) else float(*args)

    def class_of(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) in _STAND_INS and listener.is_listening:
            return type(_EXAMPLES[type(args[0])]) if type(args[0]) in _EXAMPLES else listener.tensor_class(args[0])
        return type(*args, **kwargs)

    return {"int": to_int, "float": to_float, "type": class_of}


def _whole(number: Any) -> Any:
    """Return `int(number)`; of a quotient of sizes as a floor division, with which torch can compute shapes."""
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
