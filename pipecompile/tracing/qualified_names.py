"""Qualified names of functions, classes and other objects that a text cannot hold, and the way back from a name.

    torch.nn.functional.relu     ──►  "torch.nn.functional.relu"     ──►  the same function
    mymodel.layers.swish         ──►  "mymodel.layers.swish"         ──►  Named("mymodel.layers.swish"), which cannot be called

A name is looked up in modules of torch, of pipecompile and of Python's operators that are already imported; nothing is imported and
no code of a model runs.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

from pipecompile.errors import InputError
from pipecompile.torch_private.fx_graphs import OpOverload

__all__ = ["Named", "qualified", "resolved"]

_TRUSTED = ("torch", "_operator", "builtins", "math", "pipecompile")
_RUN_CODE = (
    *(f"builtins.{name}" for name in ("__import__", "breakpoint", "compile", "eval", "exec", "input", "open")),
    *(
        f"torch.{name}"
        for name in ("load", "hub.", "package.", "serialization.", "utils.cpp_extension.", "ops.load_library")
    ),
    "torch._ops._Ops.load_library",
)
"""Beginnings of names that a text cannot call: they run code or files."""
_VARIABLE_FUNCTIONS = "_VariableFunctionsClass."


@dataclass(frozen=True)
class Named:
    """An object of which only the qualified name is known."""

    name: str

    def __post_init__(self) -> None:
        word = "".join(letter if letter.isalnum() else "_" for letter in self.name.rpartition(".")[2]) or "_"
        object.__setattr__(self, "__name__", word)  # fx writes code with it
        object.__setattr__(self, "__qualname__", word)

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise InputError(
            f"{self.name} cannot be called: the graph was read from its text, which has names instead of functions",
            hint="pc.trace the model again",
        )


_MOST_PARTS = 32
"""Parts of the longest name that is looked up: the search takes their square."""


def qualified(target: Any) -> str:
    """Return the dotted name of a function or class; of any other object that of its class."""
    if isinstance(target, Named):
        return target.name
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    if inspect.ismethod(target) and isinstance(target.__self__, type):
        return f"{qualified(target.__self__)}.{target.__name__}"
    name, module = getattr(target, "__qualname__", None), getattr(target, "__module__", None)
    if not isinstance(name, str):
        return qualified(type(target))
    return f"{module}.{name.removeprefix(_VARIABLE_FUNCTIONS)}" if isinstance(module, str) else name


def resolved(name: str) -> Any:
    """Return the object that `qualified` names so if a trusted module has it, else a Named."""
    parts = name.split(".")
    is_trusted = parts[0] in _TRUSTED and not name.startswith(_RUN_CODE) and len(parts) <= _MOST_PARTS
    for end in range(len(parts) - 1, 0, -1) if is_trusted else ():
        if (owner := sys.modules.get(".".join(parts[:end]))) is not None:
            found: Any = owner
            for part in parts[end:]:
                found = getattr(found, part, None)
            if found is not None and qualified(found) == name:
                return found
    return Named(name)
