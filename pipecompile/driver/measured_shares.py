"""Shares of micro-batches measured on a loss function that cannot be analysed, by gradients at random outputs.

    d loss(whole) / d rows of m   =   share of m  *  d loss(m) / d rows of m

holds for a mean over what counts, whatever the outputs are. A loss for which it fails mixes samples: micro-batches change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipecompile.batching.containers import copied, on_device
from pipecompile.batching.merging import MergeKind, gather, ungather
from pipecompile.batching.microbatches import Weights, loss_weights
from pipecompile.driver.loss_trial import loss_undone
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.ir import TARGET
from pipecompile.tracing.state.signal_errors import signal_errors_kept

__all__ = ["MeasuredShares"]

_DRAWS = 5
"""Draws of the outputs in the first step: a share that depends on the outputs differs among them."""

_TOLERANCE = 1e-3
"""Relative difference of gradients and of shares in single precision."""

Tensors = Sequence[torch.Tensor]

_Result = tuple[torch.Tensor, list[torch.Tensor]]
"""A loss, and the gradients of it."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """Arguments of a step, whole and in micro-batches of `sizes` samples, and the random numbers that its outputs are drawn from."""

    whole: Mapping[str, Any]
    parts: Sequence[Mapping[str, Any]]
    sizes: tuple[int, ...]
    source: torch.Generator
    is_normal: bool

    def numbers(self, shape: Sequence[int]) -> torch.Tensor:
        """Return random numbers of a shape: normal ones, or uniform ones in [0, 1)."""
        return (torch.randn if self.is_normal else torch.rand)(shape, generator=self.source)


@dataclass(slots=True)
class MeasuredShares:
    """The shares of one loss function, measured in every step on the targets of the step.

    `warn` is called once if a later step shows a loss that micro-batches change. `values` gives the context in which the loss can read
    the parameters that it uses. `changes_state`: a call has changed state of the loss, or drawn.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    outputs: LossOutputs
    device: torch.device
    warn: Callable[[], None]
    values: Callable[[], AbstractContextManager[None]] = nullcontext
    inputs: tuple[str, ...] = ()
    changes_state: bool = False

    def __post_init__(self) -> None:
        self.inputs = tuple(dict.fromkeys(name for known in self.outputs.known.values() for name in known.inputs))

    def is_defined(self, whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], sizes: tuple[int, ...]) -> bool:
        """Return whether the loss of these targets has shares that do not depend on the outputs."""
        with self.values():
            found = [self._measured(whole, parts, sizes, draw) for draw in range(_DRAWS)]
        if any(shares is None for shares in found):
            return False
        drawn = torch.tensor(found, dtype=torch.float64, device="cpu")
        return torch.allclose(drawn, drawn[:1].expand_as(drawn), rtol=_TOLERANCE, atol=1e-5, equal_nan=True)

    def shares(self, whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], sizes: tuple[int, ...]) -> Weights:
        """Return the weight of each micro-batch in the loss; sizes in samples."""
        with self.values():
            shares = self._measured(whole, parts, sizes, 0)
        if shares is None:
            self.warn()
            return loss_weights(sizes, mean=True)
        with torch.inference_mode(False):
            return shares, torch.tensor(shares, dtype=torch.float64, device="cpu")

    # -- one measurement --------------------------------------------------------------------------------------------

    @signal_errors_kept()
    def _measured(
        self, whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], sizes: tuple[int, ...], draw: int
    ) -> list[float] | None:
        """Return the shares at one draw of the outputs; None if the loss has none, or does not take these outputs."""
        for is_normal in (True, False):
            source = torch.Generator().manual_seed(draw)
            # the user's loss may refuse random outputs, as a loss of probabilities does
            with suppress(Exception):
                return self._shares_at(_Draw(whole, parts, sizes, source, is_normal))
        return None

    def _shares_at(self, draw: _Draw) -> list[float] | None:
        sizes, (wholes, pieces) = draw.sizes, self._drawn(draw)
        columns = zip((wholes, *pieces), (sum(sizes), *sizes), (draw.whole, *draw.parts), strict=True)
        (loss, gradients), *results = self._results([partial(self._gradients, *column) for column in columns])
        if not loss.isfinite():
            return [float("nan")] * len(sizes)
        trained = [(i, p) for i, p in enumerate(self.outputs.places) if self.outputs.values[p].requires_grad]
        divided = [
            ungather(gradient, [piece[i] for piece in pieces], self.outputs.rules[place], sizes)
            for gradient, (i, place) in zip(gradients, trained, strict=True)
        ]
        largest = max(float(gradient.abs().max()) for gradient in gradients if gradient.numel())
        if not largest:  # a loss that is switched off, or of nothing that counts: any shares are right
            return [n / sum(sizes) for n in sizes]
        shares = []
        for m, (_, own) in enumerate(results):
            share = _ratio([one[m] for one in divided], own, largest)
            if share is None:
                return None
            shares.append(share)
        total = sum(share * float(one) for share, (one, _) in zip(shares, results, strict=True) if share)
        return shares if abs(total - float(loss)) <= _TOLERANCE * max(abs(float(loss)), 1e-3) else None

    def _drawn(self, draw: _Draw) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Return the tensors of an output for the mini-batch, and for each micro-batch; those that inputs decide are computed."""
        wholes: list[torch.Tensor] = []
        columns: list[Tensors] = []
        for place in self.outputs.places:
            if (known := self.outputs.known.get(place)) is not None:
                wholes.append(known.value(draw.whole, sum(draw.sizes)).to(self.device))
                pairs = zip(draw.parts, draw.sizes, strict=True)
                columns.append([known.value(one, n).to(self.device) for one, n in pairs])
            else:
                value, column = self._random(place, draw)
                wholes.append(value)
                columns.append(column)
        return wholes, [list(row) for row in zip(*columns, strict=True)]

    def _random(self, place: int, draw: _Draw) -> tuple[torch.Tensor, Tensors]:
        """Return random values of one tensor of the output, for the mini-batch and for each micro-batch."""
        rule, sizes = self.outputs.rules[place], draw.sizes
        dtype = torch.promote_types(self.outputs.values[place].dtype, torch.float32)

        def made(n: int) -> torch.Tensor:
            return draw.numbers(self.outputs.shape(place, n)).to(self.device, dtype)

        if rule.kind is MergeKind.JOINED:
            value, rows = made(sum(sizes)), self.outputs.rows(place)
            return value, torch.split(value, [n * rows for n in sizes], rule.dim or 0)
        column = [made(1)] * len(sizes) if rule.kind is MergeKind.SAME else [made(1) for _ in sizes]
        return gather(column, rule, sizes), column

    def _results(self, calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Make calls of the loss of which each begins in the same state: one after the other if none changes it, else it is put back."""
        if not self.changes_state:
            with loss_undone(self.loss_fn, self.device) as changed:
                results = [call() for call in calls]
            if not changed:
                return results
        self.changes_state, results = True, []
        for call in calls:
            with loss_undone(self.loss_fn, self.device):
                results.append(call())
        return results

    def _gradients(self, tensors: Tensors, samples: int, given: Mapping[str, Any]) -> _Result:
        """Return the loss at an output, and the gradient of each of its tensors that requires one."""
        leaves = [
            tensor.detach().requires_grad_(bool(self.outputs.values[place].requires_grad))
            for place, tensor in zip(self.outputs.places, tensors, strict=True)
        ]
        output = self.outputs.output([leaf.clone() for leaf in leaves], samples)  # the loss may write into what it gets
        target = [copied(on_device(given[TARGET], self.device))] if given.get(TARGET) is not None else []
        loss = self.loss_fn(output, *target)
        loss = loss[0] if self.has_aux else loss
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(loss.reshape(()), trained, allow_unused=True)
        pairs = zip(trained, found, strict=True)
        return loss.detach(), [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs]


def _ratio(whole: Sequence[torch.Tensor | None], own: Tensors, largest: float) -> float | None:
    """Return the number that multiplies the gradients of a micro-batch to those of the mini-batch; None if there is none."""
    pairs = [(w.double().flatten(), o.double().flatten()) for w, o in zip(whole, own, strict=True) if w is not None]
    if not pairs:
        return None
    one, other = (torch.cat([pair[i] for pair in pairs]) for i in (0, 1))
    if not bool(one.any()):
        return 0.0
    square = float(other @ other)
    share = float(one @ other) / square if square else float("nan")
    return share if float((one - share * other).abs().max()) <= _TOLERANCE * largest else None
