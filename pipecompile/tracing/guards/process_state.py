"""State of the process that functions and flags of torch return: the number of threads, determinism, flags of the back ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from pipecompile.tracing.guards.container_state import ATOMS
from pipecompile.tracing.guards.read_state import Place, ReadState

__all__ = ["add_flags", "add_result", "returns_state"]

_PREFIXES = ("get_", "is_", "are_", "current_")
_SUFFIXES = ("_enabled", "_allowed")
_NAMES = frozenset({"initial_seed"})

_RECORDED = frozenset({"is_grad_enabled", "is_inference_mode_enabled", "is_compiling", "is_dynamo_compiling", "is_exporting", "is_tracing", "is_scripting"})  # fmt: skip
"""Facts of a call or of its recording, which are noted with the call."""

_SLOW = ("torch.cuda", "torch.xpu", "torch.mtia", "torch.mps", "torch.accelerator", "torch._dynamo", "torch.compiler")
"""Modules whose functions ask a driver, or the compiler."""

_BACK_ENDS = "torch.backends"


def returns_state(function: Any) -> bool:
    """Return whether a value is a function of torch without arguments that returns plain state of the process, by its name."""
    if not isinstance(function, (FunctionType, BuiltinFunctionType)):
        return False
    name, module = function.__name__, function.__module__ or ""
    is_getter = name.startswith(_PREFIXES) or name.endswith(_SUFFIXES) or name in _NAMES
    is_of_torch = module.partition(".")[0] == "torch" and not module.startswith(_SLOW)
    return is_getter and is_of_torch and name not in _RECORDED and "autocast" not in name and "compil" not in name


def add_result(state: ReadState, function: Callable[[], Any], label: str, place: Place) -> None:
    """Note what a function of torch returns now. One that needs arguments, or that fails, returns nothing."""
    _add(state, _result, function, f"{label}()", place)


def add_flags(state: ReadState, holder: Any, names: Iterable[str], label: str, place: Place) -> None:
    """Note the flags of a back end of torch that code names, such as `torch.backends.cudnn.benchmark`."""
    cls = type(holder)
    if cls is ModuleType or not (cls.__module__ or "").startswith(_BACK_ENDS):
        return
    for name in sorted(names):
        has_flag = hasattr(cls, "__getattr__") and name not in vars(holder)
        if not name.startswith("_") and (has_flag or hasattr(getattr(cls, name, None), "__set__")):
            where = place if isinstance(place, str) else (place[0], name)
            _add(state, attrgetter(name, name), holder, f"{label}.{name}", where)


def _add(state: ReadState, fetch: Callable[[Any], Iterable[Any]], holder: Any, label: str, place: Place) -> None:
    try:
        values = tuple(fetch(holder))
    except Exception:  # of torch: not in this build, not for this device, no such flag
        return
    if isinstance(values[0], ATOMS) and label not in state.values:
        state.add_row(fetch, holder)
        state.add(label, values[0], place)


def _result(function: Callable[[], Any]) -> tuple[Any]:
    return (function(),)
