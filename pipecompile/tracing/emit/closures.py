"""Functions that a call takes and that hold tensors of this call: a node rebuilds them, with the tensors of each micro-batch.

scale = h.mean()                           scale = mean(h)
h.register_hook(lambda g: g * scale)       hook = rebuilt(<lambda>, [scale])
                                           register_hook(h, hook)

The same holds for defaults, and for sizes that depend on the batch. A list or dict is rebuilt if the call made its tensors. Other
containers are the user's own objects: a hook may write into a list, and the user reads the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from pipecompile.batching.block_masks import with_cells
from pipecompile.errors import TraceError
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.tracing.container_items import values_in
from pipecompile.tracing.emit.made_objects import assigned_variables
from pipecompile.tracing.reachable_code import has_content

__all__ = ["ClosedOver", "rebuilt", "tensor_cells"]


def tensor_cells(function: object) -> dict[str, Any]:
    """Return the contents, by name, of the variables that a function closes over and of its defaults, if they are tensors, or hold
    tensors of this call or sizes of the batch, also in functions there.

    A tensor from before the call in a variable that the function assigns anew is left where it is: the next call reads what is there.
    """
    if not isinstance(function, FunctionType):
        return {}
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    contents = {name: cell.cell_contents for name, cell in cells.items() if has_content(cell)} | _defaults(function)
    own = {name for name in assigned_variables(function.__code__) if not _is_of_call(contents.get(name))}
    return {
        n: content for n, content in contents.items() if n not in own and content is not function and _is_held(content)
    }


def rebuilt(function: FunctionType, names: Sequence[str], contents: Sequence[Any]) -> FunctionType:
    """Return the function with other contents of these variables and defaults. Plans name graph nodes after this function."""
    copy, given = with_cells(function, names, contents), dict(zip(names, contents, strict=True))
    known = _defaults(function)
    defaults = {name: given.get(name, value) for name, value in known.items()}
    if any(defaults[name] is not value for name, value in known.items()):
        keywords = function.__kwdefaults__ or {}
        copy.__defaults__ = tuple(value for name, value in defaults.items() if name not in keywords)
        copy.__kwdefaults__ = {name: defaults[name] for name in keywords}
    return copy


def _defaults(function: FunctionType) -> dict[str, Any]:
    """Return the defaults of a function by name, those of keywords last."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})


@dataclass(slots=True)
class ClosedOver:
    """The contents of variables at the time when functions were recorded. Python would look them up when it calls the functions.

    `noted` has the functions, what they closed over, by name, and the lines of their calls.
    """

    noted: list[tuple[FunctionType, dict[str, Any], str]] = field(default_factory=list)

    def note(self, function: FunctionType, contents: dict[str, Any], where: str) -> None:
        """Note what a function closes over at this line."""
        self.noted.append((function, contents, where))

    def check(self) -> None:
        """Raise TraceError if the forward has assigned a variable anew after a function that closes over it was recorded."""
        for function, contents, where in self.noted:
            now = tensor_cells(function)
            changed = [name for name, content in contents.items() if now.get(name) is not content]
            if changed:
                raise TraceError(
                    f"cannot trace: {function.__name__} closes over {changed[0]}, which is assigned anew after this line",
                    where=where,
                    hint=f"give it the present value as a default: def {function.__name__}(..., {changed[0]}={changed[0]})",
                )


def _is_held(content: Any) -> bool:
    """Return whether the content is a tensor, or holds something of this call."""
    return isinstance(content, torch.Tensor) or _is_of_call(content)


def _is_of_call(content: Any, around: tuple[int, ...] = ()) -> bool:
    """Return whether the content is, or holds, a tensor of this call or a size of its batch. `around` has the ids of the containers around
    it, of which it may be one.
    """
    if isinstance(content, (FakeTensor, torch.SymInt, torch.SymFloat)):
        return True
    if isinstance(content, FunctionType):
        return bool(tensor_cells(content))
    if not isinstance(content, _CONTAINERS) or id(content) in around:
        return False
    return any(_is_of_call(one, (*around, id(content))) for one in values_in(content))


_CONTAINERS = (list, tuple, dict)
