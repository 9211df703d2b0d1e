"""Tensors that code may write in a later call, though it wrote none in the calls that were watched: by the names that the code has.

if self.calls > 100:
    self.scale.data.clamp_(0, 1)        `data` and `clamp_` write, and the tensor is called `scale`
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType

import torch

from pipecompile.tracing.loaded_names import may_write_tensors, names_in

__all__ = ["writable_tensors"]


def writable_tensors(
    functions: Iterable[FunctionType], tensors: Iterable[tuple[str, torch.Tensor]]
) -> list[torch.Tensor]:
    """Return those of the tensors, with their names in a module, that functions name, if one of these names something that writes tensors:
    others may pass the tensor to it. A tensor with the name "" is none of a module, and code that is near reaches it.
    """
    codes = [function.__code__ for function in functions]
    if not any(map(may_write_tensors, codes)):
        return []
    names = frozenset[str]().union(*map(names_in, codes))
    is_any = not names.isdisjoint(_ALL)
    named = ((name.rpartition(".")[2], tensor) for name, tensor in tensors)
    return [tensor for name, tensor in named if is_any or not name or name in names]


_ALL = frozenset(("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "getattr"))
"""Names by which code reaches the tensors of a module without their own names."""
