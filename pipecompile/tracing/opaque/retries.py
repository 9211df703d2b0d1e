"""The retry loop of a recording: each time that it fails, one more piece of the model becomes opaque.

record ──► fails ──► the smallest piece that the exception passed through ──► trial runs ──► result specs
   ▲                    (the next larger piece if no spec can be inferred)                        │
   └──────────────────────── record again, with that piece as one node ◄──────────────────────────┘

A comparison of sizes that the data decide fails the recording as well. If no piece around it can be opaque, it is answered for the
example, and every run checks that. State that calls carry on, outside of any piece, is recorded as such (`state/carried_state`).
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
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.attempts import LARGEST_SHARE, OpaquePieces, OpaqueReason
from pipecompile.tracing.opaque.hooked_layers import hooked_layers
from pipecompile.tracing.state.carried_state import Carrying
from pipecompile.tracing.state.hook_leftovers import UndoneHooks
from pipecompile.tracing.state.second_call import CarriedStateError

__all__ = ["record_with_retries"]

T = TypeVar("T")

_ATTEMPTS = 64
"""Upper limit of recordings of one model; every failed recording makes at least one more piece opaque."""


def record_with_retries(
    model: nn.Module,
    inputs: FlatInputs,
    attempt: Callable[[OpaquePieces], T],
    kept: Sequence[OpaqueReason] = (),
    *,
    carries: Carrying = Carrying.NOTHING,
) -> T:
    """Return what `attempt` records, with few opaque pieces beside those of `kept` and hooked layers. Raise TraceError if nothing helps.

    `carries` says which state a recording may carry from call to call.
    """
    hooked = hooked_layers(model)
    for pieces in filter(None, dict.fromkeys(((*kept, *hooked), hooked))):
        with suppress(Exception):  # a piece is gone, returns another kind of result now, or cannot run
            return _with_retries(OpaquePieces(model, inputs, carries=carries).begin_with(pieces), attempt)
    return _with_retries(OpaquePieces(model, inputs, carries=carries), attempt)


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
    """Record state that calls carry on, or make one more piece opaque; for a comparison of sizes within no piece, answer it for the
    example. Raise TraceError.
    """
    is_comparison = isinstance(error.__cause__ or error, DataSizeCompared)
    carried = opaque.carried
    if isinstance(error, CarriedStateError) and error.is_fixed_buffer and not opaque.is_batch_fixed:
        opaque.is_batch_fixed = True
        return
    if isinstance(error, CarriedStateError) and carried.learn(error, error.carried):
        opaque.is_batch_fixed |= error.has_batch_size
        return
    if isinstance(error, CarriedStateError) and error.can_be_single and _is_whole(opaque.model, error.pieces):
        is_single_call = carried.allowed is Carrying.SINGLE_CALLS
        if is_single_call and carried.serve_once(error):
            return
    try:
        opaque.grow(error)
    except TraceError:
        if isinstance(error, CarriedStateError) and error.can_be_single and carried.serve_once(error):
            return
        if not is_comparison:
            raise
        opaque.refuses_data_sizes = False


def _is_whole(model: nn.Module, pieces: Sequence[Piece]) -> bool:
    """Return whether the smallest piece has nearly all of the model in it, so that no cut would be left."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    return any(
        sum(p.numel() for p in model.get_submodule(one.path).parameters()) > LARGEST_SHARE * whole for one in pieces[:1]
    )
