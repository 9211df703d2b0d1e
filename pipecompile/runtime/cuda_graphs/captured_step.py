"""A captured step: forwards, losses and backwards of all micro-batches on all stages of one GPU, replayed in one launch.

    arrivals ──copied──► static arrivals ═ replay ═► static departures ──copied──► departures of the frame
                                               └───► sums of the gradients of weights, which are their `.grad`

Two graphs differ in what they do with the sums: one overwrites them, the other adds to them. They lie outside of the memory of the
graphs, since they live until the next step, and graphs for other inputs use the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipecompile.runtime.cuda_graphs.capture import GraphCapture
from pipecompile.runtime.cuda_graphs.replay import static_copy, summary_of, uncached_autocast, write_static
from pipecompile.runtime.cuda_graphs.static_arrivals import Arrivals
from pipecompile.runtime.cuda_graphs.step_code import StepCode
from pipecompile.runtime.cuda_graphs.step_gradients import StepGradients
from pipecompile.runtime.dispatch import run_inline
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.run_errors import InstructionFailure
from pipecompile.text.shown_value import type_text
from pipecompile.torch_private import pytree
from pipecompile.torch_private.storages import foreach_copy

__all__ = ["CapturedStep", "UncapturableError", "run_in_order"]


class UncapturableError(Exception):
    """A step cannot be captured, or a graph of it would have other results."""


class CapturedStep:
    """The graphs of a step for arrivals of one signature.

    inputs     static tensors for what arrives
    leaves     tensors to whose `.grad` the backwards may add
    weights    those of them that do get a gradient
    sums       the sums of these gradients, which the graphs for all signatures share
    """

    def __init__(
        self,
        code: StepCode,
        capture: GraphCapture,
        given: Arrivals,
        frame: Frame,
        leaves: Sequence[torch.Tensor],
        sums: StepGradients,
    ) -> None:
        self.code, self.capture, self.given, self.leaves, self.sums = code, capture, given, leaves, sums
        self.inputs = [static_copy(tensor) for tensor in given.tensors]
        self.frame, self.weights = code.new_frame(frame), list[torch.Tensor]()
        self._addresses = self._memory()
        self._replays: dict[bool, tuple[list[Any], pytree.TreeSpec, Callable[[], None]]] = {}
        for leaf in leaves:
            sums.sum_of(leaf)
        self._replay_of(adds=False)
        weakref.finalize(self, capture.drain)

    @property
    def is_current(self) -> bool:
        """Whether the leaves are where they were, and require gradients as they did."""
        return self._memory() == self._addresses

    def _memory(self) -> list[tuple[int, bool]]:
        return [(leaf.data_ptr(), leaf.requires_grad) for leaf in self.leaves]

    def run(self, frame: Frame, tensors: Sequence[torch.Tensor]) -> None:
        """Replay the step for tensors that arrive. Their results go into the departures of `frame`, in memory of the caller."""
        write_static(self.inputs, tensors)
        adds = self.sums.replay(self.weights, lambda adds: self._replay_of(adds=adds))
        leaves, spec, _ = self._replays[adds]
        frame.departures.update(pytree.tree_unflatten(_copies(leaves), spec))

    def _replay_of(self, *, adds: bool) -> Callable[[], None]:
        """Return the replay of the graph that adds to the sums, or that overwrites them, captured at the first request."""
        if adds not in self._replays:
            try:
                with self._gradients_set(adds=adds), uncached_autocast():
                    (leaves, spec), replay = self.capture.capture(lambda: self._launched(adds=adds))
            except Exception as error:
                raise self._explained(error) from error
            self._replays[adds] = leaves, spec, replay
        return self._replays[adds][2]

    def _explained(self, error: Exception) -> BaseException:
        """Return the error to raise for a capture that failed."""
        if not isinstance(error, InstructionFailure):
            return error if isinstance(error, UncapturableError) else UncapturableError(summary_of(error))
        if not isinstance(error.error, Exception):
            return error  # Ctrl-C
        instruction = self.code.code.program.rows[error.device][error.index]
        return UncapturableError(f"{instruction.action or instruction.op.value}: {summary_of(error.error)}")

    @contextmanager
    def _gradients_set(self, *, adds: bool) -> Iterator[None]:
        """Let the backwards add to nothing, or to the sums. Put back each `.grad` at the end."""
        before = [leaf.grad for leaf in self.leaves]
        own = set(map(id, self.weights)) if adds else set[int]()
        try:
            for leaf in self.leaves:
                leaf.grad = self.sums.sum_of(leaf) if id(leaf) in own else None
            yield
        finally:
            for leaf, gradient in zip(self.leaves, before, strict=True):
                leaf.grad = gradient

    def _launched(self, *, adds: bool) -> tuple[list[Any], pytree.TreeSpec]:
        """Launch the step, and what overwrites the sums. Return the leaves of what departs, and their structure."""
        self.code.leaves.clear()
        departures = run_in_order(self.code, self.code.new_frame(self.frame), self.given.filled(self.inputs))
        if set(self.code.leaves) - set(map(id, self.leaves)):
            raise UncapturableError("other tensors got gradients than in the step before")
        with_gradient = [leaf for leaf in self.leaves if leaf.grad is not None]
        for leaf in with_gradient:
            _require_plain(leaf, leaf.grad, self.sums.sum_of(leaf) if adds else None)
        if not adds and with_gradient:
            _write_sums([self.sums.sum_of(leaf) for leaf in with_gradient], [leaf.grad for leaf in with_gradient])
            self.weights = with_gradient
        leaves, spec = pytree.tree_flatten(departures)
        _require_copyable(leaves)
        return leaves, spec


def run_in_order(code: StepCode, own: Frame, arrivals: dict[tuple[str, bool], Any]) -> dict[tuple[str, bool], Any]:
    """Run the step uncaptured or within a capture, on a frame that only this run uses. Return what departs. Raise InstructionFailure."""
    own.arrivals = arrivals
    try:
        run_inline(code.code, own)
    except BaseException:
        own.clear()  # the traceback keeps the frame
        raise
    return own.departures


def _require_plain(leaf: torch.Tensor, gradient: Any, total: torch.Tensor | None) -> None:
    """Raise UncapturableError unless a gradient can be copied into its sum, or is the sum."""
    is_plain = gradient.layout is torch.strided and gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
    if not is_plain or (total is not None and gradient.data_ptr() != total.data_ptr()):
        raise UncapturableError(
            f"a gradient of shape {tuple(leaf.shape)} is {gradient.layout}, or is not added in place"
        )


def _require_copyable(leaves: Sequence[Any]) -> None:
    """Raise UncapturableError for values that a replay cannot return: objects, and tensors that are not strided."""
    for leaf in leaves:
        is_plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
        if not is_plain and leaf is not None and not isinstance(leaf, (bool, int, float, complex, str, bytes)):
            raise UncapturableError(f"the step returns {type_text(leaf)}, which no replay could make anew")


def _write_sums(sums: Sequence[torch.Tensor], gradients: Sequence[Any]) -> None:
    with torch.no_grad():
        foreach_copy(sums, gradients)


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves with each tensor copied into memory of its own, in few launches."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with torch.no_grad():
        made = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
        if made:
            foreach_copy(made, tensors)
    fresh = iter([own.requires_grad_(tensor.requires_grad) for own, tensor in zip(made, tensors, strict=True)])
    return [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
