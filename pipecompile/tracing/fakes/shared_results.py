"""Results of operators on fake tensors, shared by all recordings of the process.

Torch keeps the results of one recording, per operator and shapes, and computes them anew in the next: a model's graph, its loss and the
later recordings of a test or a notebook have most in common. A result is shared if the recording has made no guard until then, so that
nothing but shapes and settings has decided it, and if it is of an operator of torch itself on plain arguments.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipecompile.torch_private.kernel_settings import kernel_settings

__all__ = ["SharedResults"]

_MOST = 8192
"""Results that are kept, about 2 KB each."""

_known: dict[Any, Any] = {}
"""Results by symbol, its size in the example, settings of kernels, operator and arguments."""

_PLAIN = {
    "builtins",
    "torch",
    "torch._ops",
    "torch._subclasses._fake_tensor_utils",
    "torch.fx.experimental.symbolic_shapes",
}
"""Modules of the types of arguments whose equality says all: no user's objects, no generators."""


class SharedResults(dict[Any, Any]):
    """Results that a ShapeEnv keeps, with those of other recordings behind them. Use as `env.fake_tensor_cache`."""

    def __init__(self, env: ShapeEnv, symbol: sympy.Symbol, size: int) -> None:
        super().__init__()
        self._env, self._symbol = env, (symbol, size)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the result of this recording, or of another one in which the symbol stood for as many samples."""
        if (own := super().get(key)) is not None:
            return own
        return default if self._env.replacements else _known.get(self._shared(key), default)

    def __setitem__(self, key: Any, result: Any) -> None:
        super().__setitem__(key, result)
        if not self._env.guards and not self._env.replacements and _is_plain(key) and _is_of_tensors(result):
            if len(_known) >= _MOST:
                _known.clear()
            _known[self._shared(key)] = result

    def _shared(self, key: Any) -> Any:
        return self._symbol, kernel_settings(), key


def _is_plain(key: Any) -> bool:
    """Return whether a key has an operator of torch and arguments that are equal if their values are."""
    if getattr(key.key[0], "namespace", None) != "aten":
        return False
    return {cls.__module__ for cls in set(map(type, key.key))} <= _PLAIN


def _is_of_tensors(result: Any) -> bool:
    """Return whether a result consists of new tensors and written arguments, or says that it cannot be kept."""
    parts = getattr(result, "output_infos", ())
    return all(part.metadata is not None or part.inplace_idx is not None for part in parts)
