"""The signature of a call: everything that the choice of a recording depends on, but for sizes of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs, first_difference
from pipecompile.batching.input_layouts import layout_of
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.errors import InputError
from pipecompile.torch_private.modules import modules_in
from pipecompile.tracing.ambient_modes import INFERENCE_MODE, LAYOUTS, autocast_kinds
from pipecompile.tracing.fakes.fake_tensors import user_attributes

__all__ = ["Signature", "is_served", "signature_of", "signatures_of"]

Signature = tuple[Any, ...]
"""Structure of the inputs, modes of all modules, autocast, the default dtype, then per input leaf its shape without the batch,
its dtype, class and the names set on it, or its plain value. The last entry has what few models ask for: whether inference mode is on, and the layouts of the
inputs.
"""


def signature_of(model: nn.Module, batch: MiniBatch) -> Signature:
    """Return the signature that all micro-batches share.

    Raises InputError if micro-batches of lists with an entry per sample differ in shapes or plain values.
    """
    if not batch.calls:
        return _signature(model, batch.whole, parts=[values[0] for values in batch.values])
    first, *others = (_signature(model, share) for share in batch.calls)
    for m, other in enumerate(others, start=1):
        if other != first:
            raise InputError(
                "the micro-batches of lists with an entry per sample differ in shape",
                where=first_difference(batch.calls[0], batch.calls[m], m),
                why="one recording serves all micro-batches of a step",
                hint="entries of the same shapes and plain values, or n_microbatches=1",
            )
    return first


def signatures_of(model: nn.Module, calls: Sequence[FlatInputs]) -> list[Signature]:
    """Return the signature of each micro-batch of a list."""
    modes = training_modes(model)
    return [_signature(model, call, modes) for call in calls]


def is_served(wanted: Signature, recorded: Signature, asked: Mapping[str, str]) -> bool:
    """Return whether a recording that asks for these details, by name, serves calls of a signature."""
    if wanted == recorded or wanted[:-1] != recorded[:-1]:
        return wanted == recorded
    inference, layouts = (now == then for now, then in zip(wanted[-1], recorded[-1], strict=True))
    return (inference or INFERENCE_MODE not in asked) and (layouts or LAYOUTS not in asked)


def _signature(
    model: nn.Module, inputs: FlatInputs, modes: tuple[bool, ...] | None = None, parts: Sequence[Any] = ()
) -> Signature:
    """Return the signature of a call; `parts` are the leaves of its first micro-batch, if they differ from the call's."""
    modes = training_modes(model) if modes is None else modes
    leaves = [_leaf_signature(leaf, dim) for leaf, dim in zip(inputs.leaves, inputs.dims, strict=True)]
    details = torch.is_inference_mode_enabled(), tuple(map(layout_of, parts or inputs.leaves))
    return (inputs.spec, modes, autocast_kinds(), torch.get_default_dtype(), *leaves, details)


def training_modes(model: nn.Module) -> tuple[bool, ...]:
    """Return `training` of every module, breadth first."""
    return tuple([module.training for module in modules_in(model)])


@lru_cache(maxsize=1024)
def _shape_without(shape: torch.Size, dim: Any) -> tuple[int | None, ...]:
    """Return a shape with None in the place of the batch dimension."""
    return tuple([None if place == dim else size for place, size in enumerate(shape)])


def _leaf_signature(leaf: Any, dim: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _shape_without(leaf.shape, dim), leaf.dtype, leaf.requires_grad, type(leaf), *user_attributes(leaf)
    if hasattr(leaf, "__array__") and getattr(leaf, "ndim", False):
        raise InputError(
            f"an input is a {type(leaf).__module__}.{type(leaf).__name__}",
            why="only tensors are cut into micro-batches",
            hint="torch.from_numpy(...)",
        )
    return type(leaf), leaf
