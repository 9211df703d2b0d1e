"""The opaque pieces of a model: each recording that fails makes one more, whose results are inferred from trial runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.errors import TraceError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.tracing.emit.call_objects import KnownObjects
from pipecompile.tracing.model_pieces import Piece, UnpredictableResult, candidates, same_class_pieces
from pipecompile.tracing.opaque.result_spec import ResultSpec, are_comparable, infer_result_specs
from pipecompile.tracing.opaque.trial_calls import TrialCall
from pipecompile.tracing.opaque.trial_inputs import DataChange, further_runs, vary_input
from pipecompile.tracing.opaque.trial_runs import run_trial
from pipecompile.tracing.opaque.unread_parts import UnreadPartError
from pipecompile.tracing.outlining.outlined_calls import UnsuitableBlock
from pipecompile.tracing.state.carried_state import CarriedState, Carrying
from pipecompile.tracing.state.second_call import CarriedStateError
from pipecompile.tracing.state.snapshot import tensors_of
from pipecompile.tracing.trace_errors import (
    GradientStateError,
    as_trace_error,
    beside_kept,
    cause_of,
    eager_failure,
    needs_values,
    through_kept,
)

__all__ = ["LARGEST_SHARE", "OpaquePieces", "OpaqueReason"]

_DRAWS = 4
"""Trial runs with other draws, if a piece draws random numbers: what it returns may depend on them, as with layer drop."""

LARGEST_SHARE = 0.75
"""The part of the model's parameters that one call of a block may use."""
_INCURABLE = ("PC106", "PC113")
"""Codes of failures that no opaque call avoids: backward hooks on the whole model, reads of gradients."""


@dataclass(frozen=True, slots=True)
class OpaqueReason:
    """The failure that made a piece opaque, without its traceback, whose frames hold every tensor of the attempt."""

    piece: Piece
    fault: TraceError


class OpaquePieces:
    """The opaque pieces of one model; grows with each failed recording.

    `reasons` has the opaque pieces, `result_specs` what each of their calls returns, `rejected` why a piece cannot be
    opaque, and `hints` what to try then. `is_batch_fixed`: the recording is for one batch size only. `has_grad`: trial runs record
    gradients. `known_objects`: what functions of earlier recordings hold. `inlined`: ids of layers to record through. `has_blocks`:
    blocks of statements may be pieces; they may not after a recording with them has failed. `has_unread`: inner lists may have another
    length in each run; they may not after the recording has read one. `carried`: state that calls carry on.
    """

    def __init__(self, model: nn.Module, inputs: FlatInputs, *, carries: Carrying = Carrying.NOTHING) -> None:
        self.model, self.inputs = model, inputs
        self.reasons: dict[Piece, OpaqueReason] = {}
        self.result_specs: dict[Piece, list[ResultSpec]] = {}
        self.rejected: dict[Piece, str] = {}
        self.hints: dict[str, None] = {}
        self.is_batch_fixed = bool(inputs.lists)
        self.has_grad = self.has_blocks = self.has_unread = self.refuses_data_sizes = True
        self.known_objects: KnownObjects | None = None
        self.inlined, self.carried = set[int](), CarriedState(carries)

    def begin_with(self, kept: Iterable[OpaqueReason]) -> OpaquePieces:
        """Make modules and methods opaque that an earlier recording kept whole. Raise an exception if one cannot be any more."""
        self.reasons = {reason.piece: reason for reason in kept if reason.piece.is_part}
        self.result_specs = self._infer(self.reasons) if self.reasons else {}
        return self

    def grow(self, error: Exception) -> None:
        """Make one more piece opaque, because a recording failed with `error`. Raise TraceError if no piece is left."""
        fault = as_trace_error(error, self.model)
        cause = error.__cause__ if isinstance(error, TraceError) and error.__cause__ else error
        fault = through_kept(fault, cause, [piece.name for piece in self.reasons if not piece.line])
        is_incurable = fault.code in _INCURABLE and not isinstance(fault, GradientStateError)
        if is_incurable or not isinstance(cause, Exception):
            raise fault from cause_of(fault, cause)
        if isinstance(cause, UnreadPartError) and self.has_unread and self._fix_structures():
            return
        passed = error.pieces if isinstance(error, CarriedStateError) else candidates(cause, self.model, fault.code)
        pieces = [piece for piece in passed if piece not in self.reasons and piece not in self.rejected]
        pieces = [piece for piece in pieces if self.has_blocks or piece.block is None]
        try:
            self._grow_by(pieces, error, cause, fault)
        except TraceError:
            if not any(piece.block for piece in self.reasons):
                raise
            self.has_blocks = False
            self.reasons = {piece: reason for piece, reason in self.reasons.items() if piece.block is None}
            try:
                self.result_specs = self._infer(self.reasons)
            except UnpredictableResult as problem:
                self._reject(problem)
                raise (final := self._final(fault)) from cause_of(final, error)

    def _grow_by(self, pieces: list[Piece], error: Exception, cause: Exception, fault: TraceError) -> None:
        """Make one of the pieces opaque. Raise TraceError if none can be."""
        if pieces and self._has_no_values():
            raise TraceError(code="PC110", where=fault.where, why=f"{_reason_text(fault)}; the model or its inputs are on meta, so no part of it can be run to see what it returns") from error  # fmt: skip
        if not pieces and (needs_values(cause) or (isinstance(error, TraceError) and error.code != "PC199")):
            raise (final := self._final(fault)) from cause_of(final, error)
        for piece in pieces:
            if self._make_opaque(piece, fault):
                return
        if not pieces and not self._has_no_values():
            self._infer({})  # raises PC108 if the model fails by itself
        raise (final := self._final(fault)) from cause_of(final, error)

    def _fix_structures(self) -> bool:
        """Record for the batch size of the example alone if lists in results, which the model reads, have one length then."""
        size, change = self.inputs.samples, DataChange.LIKELY
        first = self._varied_trial(self.reasons, size, change=DataChange.NONE, seed=0)
        others = [self._varied_trial(self.reasons, size, change=change, seed=seed) for seed in range(1, _DRAWS)]
        is_fixed = first is not None and all(one and are_comparable(first, one, alike=True) for one in others)
        self.is_batch_fixed, self.has_unread = self.is_batch_fixed or is_fixed, not is_fixed
        if is_fixed:
            self.result_specs = self._infer(self.reasons)
        return is_fixed

    def _final(self, fault: TraceError) -> TraceError:
        """Return `fault`, or PC111 with the reasons why no submodule or method around it can be opaque."""
        reasons = "; ".join(f"{piece.name}: {why}" for piece, why in self.rejected.items() if piece.is_part)
        if not reasons:
            return beside_kept(fault, [piece.name for piece in self.reasons if not piece.line])
        why, hint = f"{_reason_text(fault)}. {reasons}", "; ".join(self.hints)
        return TraceError(code="PC111", where=fault.where, why=why, hint=hint)

    def _reject(self, problem: UnpredictableResult) -> None:
        self.rejected[problem.piece] = problem.why
        if problem.hint and problem.piece.is_part:
            self.hints[problem.hint] = None

    def _has_no_values(self) -> bool:
        """Return whether a tensor of the model or of the inputs is on meta or fake: such a model cannot run."""
        tensors = [*tensors_of(self.model), *(leaf for leaf in self.inputs.leaves if isinstance(leaf, torch.Tensor))]
        return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)

    def _make_opaque(self, piece: Piece, fault: TraceError) -> bool:
        """Make a piece opaque, and return whether its results can be predicted.

        The second piece of one class makes the pieces of all modules of that class opaque: they would fail one by one.
        """
        cls = type(self.model.get_submodule(piece.path))
        kind = (piece.method, piece.block)
        has_sibling = any(
            (known.method, known.block) == kind and type(self.model.get_submodule(known.path)) is cls
            for known in self.reasons
        )
        pieces = [piece]
        if has_sibling and piece.path:
            pieces = [sibling for sibling in same_class_pieces(piece, self.model) if sibling not in self.rejected]
        reasons = {**self.reasons, **{each: OpaqueReason(each, copy.copy(fault)) for each in pieces}}
        try:
            self.result_specs = self._infer(reasons)
        except UnpredictableResult as problem:
            self._reject(problem)
            self.reasons.pop(problem.piece, None)
            return problem.piece != piece and self._make_opaque(piece, fault)
        except TraceError as error:
            if piece.block is None or error.code != "PC108":
                raise
            self._infer(self.reasons)  # raises PC108 if the model fails by itself
            self.rejected[piece] = f"outlined, {error.what}"
            return False
        self.reasons = reasons
        return True

    # -- trial runs -------------------------------------------------------------------------------------------------

    def _infer(self, reasons: dict[Piece, OpaqueReason]) -> dict[Piece, list[ResultSpec]]:
        """Run the model on its inputs, and up to three times on varied ones; return the result spec of every call.

        1  the inputs as they are
        2  another batch size and changed data, or as much of it as the model accepts
        3  a third batch size, if run 2 had a second: sizes that fit two batches may do so by chance
        4  wild data, if there are opaque pieces; if functions are, of sizes that the data may decide, also other integers
        5  masks that select fewer elements, if the data decide how many a piece selects
        6  the first inputs again, in the state that a call has left, if a piece returns numbers; other draws, if it draws
        """
        size = self.inputs.samples
        runs, sizes = [_with_calls(self._first_trial(reasons, size))], [size]

        def add_run(other: int | None, change: DataChange) -> bool:
            """Run once more; return whether the run can be compared with the first."""
            run = self._varied_trial(reasons, other, change=change)
            if run is None or not are_comparable(runs[0], run, alike=not self.has_unread):
                return False
            runs.append(run)
            sizes.append(other)
            return True

        has_two_sizes = any(add_run(*one) for one in self._variations(size)) and len(set(sizes)) > 1
        numbers = any(one.returns_numbers for calls in runs[0].values() for one in calls)
        for other, change in further_runs(reasons, [*sizes], has_numbers=numbers):
            add_run(other, change)
        if any(call.selects for run in runs for calls in run.values() for call in calls):
            add_run(size, DataChange.THINNED)
        for run in self._other_draws(runs[0], size):
            runs.append(run)
            sizes.append(size)
        self.is_batch_fixed = self.is_batch_fixed or (size is not None and not has_two_sizes)
        specs = {piece: infer_result_specs(piece, [run[piece] for run in runs], sizes) for piece in reasons}
        self._check_blocks(specs)
        return specs

    def _other_draws(
        self, first: dict[Piece, list[TrialCall]], size: int | None
    ) -> Iterator[dict[Piece, list[TrialCall]]]:
        """Yield runs that draw other random numbers. Raise UnpredictableResult for a piece whose calls or structure depend on them."""
        drawing = [piece for piece, calls in first.items() if any(call.draws_random for call in calls)]
        for seed in range(2, 2 + _DRAWS) if drawing else ():
            run = self._varied_trial(first, size, change=DataChange.NONE, seed=seed)
            if run is None:
                continue
            for piece in drawing:
                if not are_comparable({piece: first[piece]}, {piece: run[piece]}):
                    raise UnpredictableResult(piece, "the structure of its result depends on the numbers that it draws")
            if are_comparable(first, run):
                yield run

    def _check_blocks(self, specs: dict[Piece, list[ResultSpec]]) -> None:
        """Raise UnpredictableResult for a block that has nearly all of the model in it: no cut would be left."""
        whole = sum(parameter.numel() for parameter in self.model.parameters())
        for piece, calls in specs.items():
            if piece.block and any(one.call.n_parameters > LARGEST_SHARE * whole for one in calls):
                raise UnpredictableResult(piece, "it contains nearly the whole model")

    def _first_trial(self, reasons: dict[Piece, OpaqueReason], size: int | None) -> dict[Piece, list[TrialCall]]:
        """Run the model on its own inputs, with gradients; if this fails and the caller has gradients off, without."""
        try:
            return self._trial(reasons, size)
        except UnsuitableBlock as unsuitable:
            piece = next(piece for piece in reasons if piece.block == unsuitable.place)
            raise UnpredictableResult(piece, unsuitable.why) from unsuitable
        except TraceError:
            raise
        except Exception as error:
            if self.has_grad and not torch.is_grad_enabled():
                self.has_grad = False
                return self._first_trial(reasons, size)
            raise eager_failure(error, self.model) from error

    def _variations(self, size: int | None) -> Iterator[tuple[int | None, DataChange]]:
        """Yield batch size and change of data for the second run, the most informative first."""
        fewer = [] if size is None or size < 2 else [size - 1]
        others = [] if self.is_batch_fixed or size is None else [*fewer, size + 1]  # BatchNorm refuses a single sample
        for other in (*others, size):
            yield other, DataChange.LIKELY
            yield other, DataChange.NONE

    def _varied_trial(
        self, pieces: Iterable[Piece], size: int | None, *, change: DataChange, seed: int = 1
    ) -> dict[Piece, list[TrialCall]] | None:
        """Run the model with other random numbers; return None if it raises on these inputs."""
        with suppress(Exception):
            return self._trial(pieces, size, seed=seed, change=change)
        return None

    def _trial(
        self,
        pieces: Iterable[Piece],
        size: int | None,
        *,
        seed: int = 0,
        change: DataChange = DataChange.NONE,
    ) -> dict[Piece, list[TrialCall]]:
        pairs = zip(self.inputs.leaves, self.inputs.dims, strict=True)
        leaves = [vary_input(leaf, dim, size, change=change) for leaf, dim in pairs]
        args, kwargs = pytree.tree_unflatten(leaves, self.inputs.spec)
        with torch.set_grad_enabled(self.has_grad):
            thins, n_before = change is DataChange.THINNED, int(change is DataChange.LATER)
            return run_trial(self.model, args, kwargs, pieces, reseed=seed, thins=thins, n_before=n_before)


def _with_calls(run: dict[Piece, list[TrialCall]]) -> dict[Piece, list[TrialCall]]:
    """Return a run. Raise UnpredictableResult for a block of which a run has seen no call: it would cost every later run, and cure nothing."""
    for piece, calls in run.items():
        if piece.block is not None and not calls:
            raise UnpredictableResult(
                piece, "its function is made in the forward, or all of its calls are inside of another piece"
            )
    return run


def _reason_text(fault: TraceError) -> str:
    return fault.what.removeprefix("cannot trace: ")
