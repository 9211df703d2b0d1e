"""Opaque where it must be: which pieces of a model are kept whole, and what each of their calls is in the recording.

recording fails ──► the smallest piece that the exception passed through ──► trial runs: what does it give?
      ▲                 (when that cannot be foretold: the next larger one)          │
      └──────────────────────── record again, that piece as one node ◄──────────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.errors import TraceError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import FAKE_TENSOR_LOGGER, FakeTensor
from pipecompile.tracing.model_pieces import Piece, alike, candidates
from pipecompile.tracing.opaque.result_spec import Foretold, Unforetold, comparable, foretold
from pipecompile.tracing.opaque.trial_runs import Call, trial
from pipecompile.tracing.opaque.variations import Change, variation
from pipecompile.tracing.state.second_call import Carried
from pipecompile.tracing.state.snapshot import tensors_of
from pipecompile.tracing.trace_errors import explained, failed_eagerly, needs_values

__all__ = ["Opaque", "Reason", "recorded"]

T = TypeVar("T")

_ATTEMPTS = 64

_WILD_SAMPLES = 8
"""Enough for a number of rows that a mask picks not to agree with the batch size by chance."""

_HOPELESS = ("PC106", "PC113")
"""What would be as wrong in a part kept whole."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a piece is kept whole."""

    piece: Piece
    fault: TraceError


class Opaque:
    """The pieces of one model that are kept whole; grows from attempt to attempt."""

    def __init__(self, model: nn.Module, inputs: FlatInputs) -> None:
        self.model, self.inputs = model, inputs
        self.reasons: dict[Piece, Reason] = {}
        self.promises: dict[Piece, list[Foretold]] = {}
        self.refused: dict[Piece, str] = {}
        self.fixed = bool(inputs.lists)
        self.grad = True

    def grow(self, error: Exception) -> None:
        """Choose one more piece because of what an attempt failed with. Raises the TraceError when there is none."""
        fault = explained(error, self.model)
        cause = error.__cause__ if isinstance(error, TraceError) and error.__cause__ else error
        if fault.code in _HOPELESS or not isinstance(cause, Exception):
            raise fault from cause
        passed = error.pieces if isinstance(error, Carried) else candidates(cause, self.model)
        found = [p for p in passed if p not in self.reasons and p not in self.refused]
        if found and self._unreal():
            raise TraceError(code="PC110", where=fault.where, why=f"{fault.what.removeprefix('cannot trace: ')}; the model or its inputs are on meta, so no part of it can be run to see what it gives") from error  # fmt: skip
        if not found and (needs_values(cause) or (isinstance(error, TraceError) and error.code != "PC199")):
            raise self._final(fault) from error
        for piece in found:
            if self._keep(piece, fault):
                return
        if not found and not self._unreal():
            self._try_out({})
        raise self._final(fault) from error

    def _final(self, fault: TraceError) -> TraceError:
        told = "; ".join(f"{piece.name}: {why}" for piece, why in self.refused.items() if not piece.line)
        if not told:
            return fault
        return TraceError(code="PC111", where=fault.where, why=f"{fault.what.removeprefix('cannot trace: ')}. {told}")

    def _unreal(self) -> bool:
        tensors = [*tensors_of(self.model), *(leaf for leaf in self.inputs.leaves if isinstance(leaf, torch.Tensor))]
        return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)

    def _keep(self, piece: Piece, fault: TraceError) -> bool:
        """Try to keep a piece whole; when it is the second of its kind, all of that kind."""
        kind = [
            p for p in self.reasons if p.method == piece.method and _class(self.model, p) is _class(self.model, piece)
        ]
        new = [p for p in alike(piece, self.model) if p not in self.refused] if kind and piece.path else [piece]
        wanted = {**self.reasons, **{one: Reason(one, fault) for one in new}}
        try:
            self.promises = self._try_out(wanted)
        except Unforetold as problem:
            self.refused[problem.piece] = problem.why
            self.reasons.pop(problem.piece, None)
            return problem.piece != piece and self._keep(piece, fault)
        self.reasons = wanted
        return True

    def _try_out(self, wanted: dict[Piece, Reason]) -> dict[Piece, list[Foretold]]:
        """Run the model on its inputs, and on a batch of another size; then say what every call gives."""
        size = self.inputs.samples
        runs, sizes = [self._first(wanted, size)], [size]

        def more(other: int | None, changed: Change) -> bool:
            """Another run; does it tell anything?"""
            run = self._second(wanted, other, changed=changed)
            if run is None or not comparable(runs[0], run):
                return False
            runs.append(run)
            sizes.append(other)
            return True

        any(more(other, changed) for other, changed in self._variations(size))
        if varies := len(set(sizes)) > 1:
            more(_third(*sizes), Change.LIKELY)
        if wanted:
            more(_WILD_SAMPLES if varies and any(piece.line for piece in wanted) else size, Change.WILD)
        self.fixed = self.fixed or (size is not None and not varies)
        return {piece: foretold(piece, [run[piece] for run in runs], sizes) for piece in wanted}

    def _first(self, wanted: dict[Piece, Reason], size: int | None) -> dict[Piece, list[Call]]:
        """A run of the model on its own inputs, with gradients if it can; without where they are off around and it cannot."""
        try:
            return self._trial(wanted, size)
        except Exception as error:
            if self.grad and not torch.is_grad_enabled():
                self.grad = False
                return self._first(wanted, size)
            raise failed_eagerly(error, self.model) from error

    def _variations(self, size: int | None) -> Iterator[tuple[int | None, Change]]:
        """Second runs, the most telling first: another batch size or not, changed data or not."""
        others = [] if self.fixed or size is None else [size - 1 if size > 1 else 2]
        for other in (*others, size):
            yield other, Change.LIKELY
            yield other, Change.NONE

    def _second(
        self, wanted: dict[Piece, Reason], size: int | None, *, changed: Change
    ) -> dict[Piece, list[Call]] | None:
        """Another run with other random numbers; None when the model cannot do that."""
        with suppress(Exception):
            return self._trial(wanted, size, reseed=True, changed=changed)
        return None

    def _trial(
        self, wanted: dict[Piece, Reason], size: int | None, *, reseed: bool = False, changed: Change = Change.NONE
    ) -> dict[Piece, list[Call]]:
        pairs = zip(self.inputs.leaves, self.inputs.dims, strict=True)
        leaves = [variation(leaf, dim, size, changed=changed) for leaf, dim in pairs]
        args, kwargs = pytree.tree_unflatten(leaves, self.inputs.spec)
        with torch.set_grad_enabled(self.grad):
            return trial(self.model, args, kwargs, wanted, reseed=reseed)


def recorded(model: nn.Module, inputs: FlatInputs, attempt: Callable[[Opaque], T]) -> T:
    """What `attempt` makes, with as few pieces kept whole as will do. Raises TraceError."""
    opaque = Opaque(model, inputs)
    for _ in range(_ATTEMPTS):
        try:
            with _quiet():
                return attempt(opaque)
        except Exception as error:
            opaque.grow(error)
    raise TraceError(what="cannot trace: too many parts of the model cannot be recorded")


def _third(size: int | None, other: int | None) -> int:
    """A batch size that is neither: what grows in proportion twice may do so by chance."""
    return next(one for one in (2, 3, 1) if one not in (size, other))


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs what fails on fake tensors; whoever calls gets the exception, which says it all."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _class(model: nn.Module, piece: Piece) -> type:
    return type(model.get_submodule(piece.path))
