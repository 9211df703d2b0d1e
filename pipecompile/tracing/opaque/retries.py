"""The retry loop of a recording: each time that it fails, one more piece of the model becomes opaque.

record ──► fails ──► the smallest piece that the exception passed through ──► trial runs ──► result specs
   ▲                    (the next larger piece if no spec can be inferred)                        │
   └──────────────────────── record again, with that piece as one node ◄──────────────────────────┘

A comparison of sizes that the data decide fails the recording as well. If no piece around it can be opaque, it is answered for the
example, and every run checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from torch import nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.errors import TraceError
from pipecompile.torch_private.modes import fake_tensor_log_disabled
from pipecompile.tracing.emit.call_objects import UndecidedObjects
from pipecompile.tracing.fakes.data_sizes import DataSizeCompared
from pipecompile.tracing.opaque.attempts import OpaquePieces, OpaqueReason
from pipecompile.tracing.opaque.hooked_layers import hooked_layers
from pipecompile.tracing.state.hook_leftovers import UndoneHooks

__all__ = ["record_with_retries"]

T = TypeVar("T")

_ATTEMPTS = 64
"""Upper limit of recordings of one model; every failed recording makes at least one more piece opaque."""


def record_with_retries(
    model: nn.Module, inputs: FlatInputs, attempt: Callable[[OpaquePieces], T], kept: Sequence[OpaqueReason] = ()
) -> T:
    """Return what `attempt` records, with few opaque pieces beside those of `kept` and hooked layers. Raise TraceError if nothing helps."""
    hooked = hooked_layers(model)
    for pieces in filter(None, dict.fromkeys(((*kept, *hooked), hooked))):
        with suppress(Exception):  # a piece is gone, returns another kind of result now, or cannot run
            return _with_retries(OpaquePieces(model, inputs).begin_with(pieces), attempt)
    return _with_retries(OpaquePieces(model, inputs), attempt)


def _with_retries(opaque: OpaquePieces, attempt: Callable[[OpaquePieces], T]) -> T:
    for _ in range(_ATTEMPTS):
        try:
            with fake_tensor_log_disabled():
                return attempt(opaque)
        except UndecidedObjects as undecided:
            opaque.known_objects = undecided.known
        except UndoneHooks as undone:
            opaque.inlined |= {id(layer) for layer in undone.layers}
        except Exception as error:
            _grow(opaque, error)
    raise TraceError(what=f"cannot trace: the model was recorded {_ATTEMPTS} times, and parts still cannot be recorded")


def _grow(opaque: OpaquePieces, error: Exception) -> None:
    """Make one more piece opaque; for a comparison of sizes within no piece, answer it for the example. Raise TraceError."""
    is_comparison = isinstance(error.__cause__ or error, DataSizeCompared)
    try:
        opaque.grow(error)
    except TraceError:
        if not is_comparison:
            raise
        opaque.refuses_data_sizes = False
