"""Deferred BatchNorm: running statistics of the whole mini-batch, updated once a step instead of once a micro-batch.

    micro-batch    n, mean, squared deviations  ─┐
    micro-batch    n, mean, squared deviations  ─┼─► those of the mini-batch ─► running mean, running variance, one count
    micro-batch    n, mean, squared deviations  ─┘

Each micro-batch is still normalised by itself. A layer runs as it is, hooks included, with empty running statistics and momentum 1,
so that the layer writes the micro-batch's statistics there. `batch_moments.py` merges them after the run; the variance is unbiased
for the number of values in the mini-batch. An InstanceNorm averages the statistics of its samples. A layer that a forward calls
twice is updated twice, in this order.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pipecompile.errors import InputError
from pipecompile.graph.cross_sample import norms_by_node
from pipecompile.graph.stages import Stage
from pipecompile.runtime.cells.batch_moments import BatchMoments, Observations, merge_all
from pipecompile.torch_private.modules import InstanceNorm, NormBase
from pipecompile.tracing.recompute_flag import is_recomputing, is_recomputing_region

__all__ = ["DeferredBatchNorm", "DeferredCall", "DeferredNorm", "DeferredNorms", "defer_norms", "joined_norms"]


class DeferredCall:
    """One call of a normalisation layer in a model's forward, and its statistics of the present mini-batch.

    `momentum` is what the call itself passes; None for the call of a layer, which takes its own. `runs` counts micro-batches, and
    `repeats` recomputations of the user's own checkpointing, each of which updates the statistics once more. In a backward of its own these
    come after the statistics were settled: `settled` and `settled_runs` keep them.
    `receiver` is the same call of another recording, which takes the statistics of a run of several recordings.
    """

    def __init__(self, layer: NormBase) -> None:
        self.layer = layer
        self.observed = Observations(isinstance(layer, InstanceNorm))
        self.momentum: float | None = None
        self.settled: BatchMoments | None = None
        self.runs = self.repeats = self.settled_runs = 0
        self.receiver: DeferredCall | None = None

    def empty_statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mean of zeros and a variance of ones, for one run of the layer."""
        assert self.layer.running_mean is not None
        assert self.layer.running_var is not None
        return torch.zeros_like(self.layer.running_mean), torch.ones_like(self.layer.running_var)

    def begin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return empty statistics for a run. Count the run here if it repeats one: a recomputation may stop within the layer."""
        if is_recomputing_region() and not is_recomputing():
            (self.receiver or self).repeats += 1
        return self.empty_statistics()

    def record(self, samples: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Note the statistics that a run with momentum 1 wrote. A recomputation is skipped: its forward was recorded."""
        if is_recomputing() or is_recomputing_region():
            return
        if self.receiver is not None:
            self.receiver.momentum = self.momentum
            self.receiver.record(samples, mean, variance)
            return
        self.runs += 1
        count = float(len(samples)) if self.observed.is_averaged else samples.numel() / samples.shape[1]
        self.observed.parts.append((count, mean, variance))

    @property
    def seen(self) -> BatchMoments | None:
        """The statistics of the present mini-batch; None if there are none."""
        return self.observed.merged()

    @seen.setter
    def seen(self, moments: BatchMoments | None) -> None:
        self.observed = Observations(self.observed.is_averaged, moments)

    def take(self) -> bool:
        """Close the statistics of the run so far. Return whether there are new ones."""
        if self.runs:
            self.settled, self.settled_runs = self.seen, self.runs
            self.seen, self.runs = None, 0
            return True
        return False

    def take_repeats(self) -> int:
        """Return how often every micro-batch was recomputed since the last time."""
        repeats, self.repeats = self.repeats // max(self.settled_runs, 1), 0
        return repeats

    def settle(self, factor: float) -> None:
        """Update the layer's running statistics as this call in one forward of the whole mini-batch would."""
        seen, layer = self.settled, self.layer
        if seen is None or layer.running_mean is None or layer.running_var is None:
            return
        variance = seen.spread if isinstance(layer, InstanceNorm) else seen.spread / (seen.count - 1)
        for running, value in ((layer.running_mean, seen.mean), (layer.running_var, variance)):
            running.data.mul_(1 - factor).add_(value.to(running.dtype), alpha=factor)

    def forget(self) -> None:
        """Drop the statistics."""
        self.seen = self.settled = None
        self.runs = self.repeats = self.settled_runs = 0


class DeferredNorm:
    """One normalisation layer with its calls, in the order of the forward. `batches` is the layer's counter before the run."""

    def __init__(self, layer: NormBase) -> None:
        self.layer = layer
        self.calls: list[DeferredCall] = []
        self.batches: torch.Tensor | None = None

    def new_call(self) -> DeferredCall:
        """Return the next call of the layer."""
        self.calls.append(DeferredCall(self.layer))
        return self.calls[-1]

    def begin(self) -> None:
        """Before a run, remember the counter, and drop the statistics of the last run."""
        if self.layer.num_batches_tracked is not None:
            self.batches = self.layer.num_batches_tracked.clone()
        for call in self.calls:
            call.forget()

    def settle(self) -> None:
        """Update statistics and counter as one forward of the whole mini-batch would.

        The layer has counted every micro-batch; the count of one of them is that of the mini-batch. Recomputations are settled with
        the run, or on their own if they come later.
        """
        new = [call for call in self.calls if call.take()]
        runs, count = max((call.settled_runs for call in self.calls), default=0), self.layer.num_batches_tracked
        if runs and self.batches is not None and count is not None:
            once = (count - self.batches).div(runs, rounding_mode="floor")
            count.data.copy_(self.batches + once)
            self.batches = count.clone()
        again = [call for call in reversed(self.calls) for _ in range(call.take_repeats())]
        updates = [*new, *again]  # regions are recomputed from the last to the first
        for later, call in zip(reversed(range(len(updates))), updates, strict=True):
            call.settle(self._factor(call, later) if call.settled else 0.0)

    def _factor(self, call: DeferredCall, later: int) -> float:
        """Return the weight of the new statistics in the update of a call, which `later` others of the layer follow."""
        momentum = self.layer.momentum if call.momentum is None else call.momentum
        if momentum is not None:
            return momentum
        count = None if isinstance(self.layer, InstanceNorm) else self.layer.num_batches_tracked
        return 0.0 if count is None else 1.0 / (float(count) - later)

    def forget(self) -> None:
        """Drop the statistics of a run that is not settled, and restore the counter."""
        if self.batches is not None and self.layer.num_batches_tracked is not None:
            self.layer.num_batches_tracked.data.copy_(self.batches)
        self.batches = None
        for call in self.calls:
            call.forget()


@dataclass(slots=True)
class DeferredNorms:
    """The deferred layers of one build. `links` are calls of other recordings, each with the call that takes its statistics."""

    norms: tuple[DeferredNorm, ...] = ()
    links: tuple[tuple[DeferredCall, DeferredCall], ...] = ()

    def begin(self) -> None:
        """Before a run, remember the counters of all layers."""
        self._link(is_linked=True)
        if self.norms:
            with torch.inference_mode(False), torch.no_grad():
                for norm in self.norms:
                    norm.begin()

    def forget(self) -> None:
        """Drop the records of a failed run."""
        self._link(is_linked=False)
        if self.norms:
            with torch.inference_mode(False), torch.no_grad():
                for norm in self.norms:
                    norm.forget()

    def merge(self) -> None:
        """Merge the statistics of the micro-batches, for all layers at once."""
        merge_all(call.observed for norm in self.norms for call in norm.calls)

    def settle(self) -> None:
        """After the forwards of a run, update the running statistics of all layers."""
        self._link(is_linked=False)
        if self.norms:
            with torch.inference_mode(False), torch.no_grad():
                self.merge()
                for norm in self.norms:
                    norm.settle()

    def share(self, home: Iterable[torch.Tensor]) -> None:
        """Return at once: there are no copies of the pipeline to share the buffers with."""

    def _link(self, *, is_linked: bool) -> None:
        for call, receiver in self.links:
            call.receiver = receiver if is_linked else None


class DeferredBatchNorm(nn.Module):
    """Replacement of a normalisation layer in the graph of a stage."""

    def __init__(self, call: DeferredCall) -> None:
        super().__init__()
        self.layer, self.call = call.layer, call

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Run the layer on empty statistics and record what it writes there."""
        layer = self.layer
        own = layer.running_mean, layer.running_var, layer.momentum
        mean, variance = self.call.begin()
        try:
            layer.running_mean, layer.running_var, layer.momentum = mean, variance, 1.0
            output: torch.Tensor = layer(samples)
        finally:
            layer.running_mean, layer.running_var, layer.momentum = own
        self.call.record(samples.detach(), mean, variance)
        return output


def defer_norms(stages: Sequence[Stage], model: nn.Module) -> DeferredNorms:
    """Rewrite the stages so that their BatchNorm layers defer. The layers themselves remain the model's."""
    norms: dict[int, DeferredNorm] = {}
    for stage in stages:
        module = stage.module
        for node, layer in norms_by_node(module, model).items():
            call = norms.setdefault(id(layer), DeferredNorm(layer)).new_call()
            if node.op == "call_module":
                node.target = f"deferred_{node.name}"
                module.add_module(node.target, DeferredBatchNorm(call))
            else:
                node.target = _deferred_function(call)
        module.recompile()
    return DeferredNorms(tuple(norms.values()))


_SIGNATURE = inspect.signature(F.batch_norm)


def _deferred_function(call: DeferredCall) -> Any:
    """Return a replacement of `F.batch_norm` for a layer whose forward calls it itself."""

    def batch_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = _SIGNATURE.bind(*args, **kwargs)
        mean, variance = call.begin()
        call.momentum = bound.arguments.get("momentum", 0.1)
        bound.arguments |= {"running_mean": mean, "running_var": variance, "momentum": 1.0}
        output = F.batch_norm(*bound.args, **bound.kwargs)
        call.record(bound.arguments["input"].detach(), mean, variance)
        return output

    return batch_norm


def joined_norms(variants: Sequence[DeferredNorms]) -> DeferredNorms:
    """Return the deferred layers of several recordings as those of one, which get the statistics of all micro-batches.

    Raises InputError if the recordings call a layer differently often: one forward of the whole mini-batch is then not defined.
    """
    norms: dict[int, DeferredNorm] = {}
    links: list[tuple[DeferredCall, DeferredCall]] = []
    for norm in (norm for variant in variants for norm in variant.norms):
        first = norms.setdefault(id(norm.layer), norm)
        if first is norm:
            continue
        if len(first.calls) != len(norm.calls):
            raise InputError(
                f"a BatchNorm layer runs {len(first.calls)} times in one micro-batch and {len(norm.calls)} times in another",
                where=str(norm.layer),
                why="batch_norm='deferred' updates it as one forward of all micro-batches would, and there is none",
                hint="batch_norm='each'",
            )
        links += zip(norm.calls, first.calls, strict=True)
    return DeferredNorms(tuple(norms.values()), tuple(links))
