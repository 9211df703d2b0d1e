"""Calls of `torch.utils.checkpoint`, recorded through: the nodes of a call get a region, and no memory is saved while recording.

Without gradients a checkpoint is a plain call, and so is its recording. The reentrant variant with no argument that requires a
gradient computes without gradients, with a warning of torch's own: the recording has these nodes under `no_grad`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import check_backward_validity, checkpoint

from pipecompile.torch_private.interception_points import early_stop_override
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.node_writer import Regions
from pipecompile.tracing.emit.value_nodes import ValueNodes
from pipecompile.tracing.recomputed_region import RecomputedRegion
from pipecompile.tracing.user_source import caller

__all__ = ["RegionListener", "record_region", "record_reentrant_region"]

_OPTIONS = ("context_fn", "determinism_check", "debug", "early_stop", "respect_saved_tensors_hooks")
_DEFAULTS = inspect.signature(checkpoint).parameters


class RegionListener(Protocol):
    """The recorder, as far as regions need it."""

    values: ValueNodes
    regions: Regions


def record_region(
    listener: RegionListener, original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Return a generator that yields once, inside a region; `original` is torch's own, called with these arguments."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if (override := early_stop_override()) is not None:
        given["early_stop"] = override
    special = {name: given[name] for name in _OPTIONS if name in given and given[name] is not _DEFAULTS[name].default}
    options = {"use_reentrant": False, "preserve_rng_state": given["preserve_rng_state"], **special}
    with _inside(listener, options, caller()):
        yield


def record_reentrant_region(
    listener: RegionListener, function: Callable[..., Any], preserve_rng_state: bool, *args: Any
) -> Any:
    """Call the function of a reentrant checkpoint, and return its result."""
    is_trained = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in args)
    if not is_trained and Ambient.now().grad:
        check_backward_validity(args)
        with torch.no_grad():
            return function(*args)
    with _inside(listener, {"use_reentrant": True, "preserve_rng_state": preserve_rng_state}, caller()):
        return function(*args)


@contextmanager
def _inside(listener: RegionListener, options: dict[str, Any], source: str) -> Iterator[None]:
    """Let new nodes belong to a region inside the block, if gradients are on."""
    values, ambient = listener.values, Ambient.now()
    around = values.region
    if ambient.grad:
        values.region = RecomputedRegion(around, ambient, listener.regions.outside, tuple(options.items()), source)
    try:
        yield
    finally:
        values.region = around
