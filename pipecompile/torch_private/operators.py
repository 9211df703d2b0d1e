"""Operators as the dispatcher knows them: their schemas and names."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._ops import (
    HigherOrderOperator,  # 2.11; an operator that takes functions, as `torch.cond` does
    OpOverload,  # 2.11
    OpOverloadPacket,  # 2.11
)

__all__ = [
    "HigherOrderOperator",
    "batch_norm_operators",
    "name_of",
    "schema_of",
    "symbolic_function",
    "torch_assert",
    "written_arguments",
    "written_tensors",
]

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an overload: its arguments, and which of them it writes. 2.11."""

name_of: Callable[[Any], str] = attrgetter("_name")
"""Return the name of a higher-order operator. 2.11."""

torch_assert = torch._assert
"""`torch._assert`, which models call to check shapes. 2.11."""


_BATCH_NORMS = (
    torch.ops.aten.native_batch_norm,
    torch.ops.aten._native_batch_norm_legit,
    torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten.miopen_batch_norm,
)

batch_norm_operators: tuple[Any, ...] = (*_BATCH_NORMS, *(packet.default for packet in _BATCH_NORMS))
"""The kernels of batch norm, which write running statistics without new versions; input, weight, bias, mean, variance and flag are first.
TorchScript calls them, and not `torch.batch_norm`. 2.11."""


_OBSERVER = "fused_moving_avg_obs_fake_quant"


def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operator writes by its schema, where no kernel may give them a new version:
    operators that are called as such, of the user's libraries for example, and the observers of torch's quantization.
    """
    named = getattr(torch.ops.aten, _OBSERVER) if func is getattr(torch, _OBSERVER) else func
    if isinstance(named, OpOverloadPacket):
        overloads = named.overloads()  # type: ignore[no-untyped-call]
        named = getattr(named, overloads[0]) if len(overloads) == 1 else None
    if not isinstance(named, OpOverload):
        return ()
    arguments = enumerate(schema_of(named).arguments)
    return tuple((i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments of an operator of the dispatcher that it writes in place, by its schema; none of an operator
    that takes functions, which has no schema. 2.11.
    """
    if isinstance(func, HigherOrderOperator):
        return []
    arguments = schema_of(func).arguments
    named = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
    values = [named.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    leaves = [leaf for value in values for leaf in (value if isinstance(value, list | tuple) else (value,))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def symbolic_function(name: str) -> Callable[[Any], Any] | None:
    """Return torch's function `name` of `math` for symbolic sizes, or None. 2.11."""
    return getattr(torch, f"_sym_{name}", None)
