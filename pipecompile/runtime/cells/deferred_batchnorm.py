"""Deferred BatchNorm: running statistics of the whole mini-batch, updated once a step instead of once a micro-batch.

    micro-batch    n, mean, squared deviations  ─┐
    micro-batch    n, mean, squared deviations  ─┼─► those of the mini-batch ─► running mean, running variance, one count
    micro-batch    n, mean, squared deviations  ─┘

Each micro-batch is still normalised by itself. A layer runs as it is, hooks included, with empty running statistics and
momentum 1, so that the layer writes the micro-batch's statistics there. Statistics are merged as by Chan, Golub and LeVeque,
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979; the variance is unbiased for the number of
values in the mini-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed, fx, nn

from pipecompile.errors import InputError
from pipecompile.graph.stages import Stage
from pipecompile.torch_private.modules import BatchNorm
from pipecompile.tracing.recompute_flag import is_recomputing

__all__ = [
    "BatchMoments", "DeferredBatchNorm", "DeferredNorms", "check_sync_batchnorm", "defer_norms", "is_synchronized", "norms_by_node",
]  # fmt: skip


@dataclass(slots=True)
class BatchMoments:
    """Statistics of one layer over the values of a mini-batch so far, per channel.

    count     values per channel
    mean      their mean, `(channels,)`
    spread    the sum of their squared deviations from the mean, `(channels,)`
    """

    count: float
    mean: torch.Tensor
    spread: torch.Tensor

    def add(self, count: float, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Merge the values of one more micro-batch, whose `variance` is unbiased."""
        total, difference = self.count + count, mean - self.mean
        self.spread += variance * (count - 1) + difference.square() * (self.count * count / total)
        self.mean = self.mean + difference * (count / total)
        self.count = total


class DeferredNorm:
    """One BatchNorm layer and the moments of the present mini-batch. `batches` is the layer's counter before the run."""

    def __init__(self, layer: BatchNorm) -> None:
        self.layer = layer
        self.seen: BatchMoments | None = None
        self.batches: torch.Tensor | None = None

    def empty_statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mean of zeros and a variance of ones, for one run of the layer."""
        if self.batches is None and self.layer.num_batches_tracked is not None:
            self.batches = self.layer.num_batches_tracked.clone()
        assert self.layer.running_mean is not None
        assert self.layer.running_var is not None
        return torch.zeros_like(self.layer.running_mean), torch.ones_like(self.layer.running_var)

    def record(self, samples: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Merge the statistics that a run with momentum 1 wrote. A recomputation is skipped: its forward was recorded."""
        if is_recomputing():
            return
        count, mean, variance = samples.numel() / samples.shape[1], mean.double(), variance.double()
        if self.seen is None:
            self.seen = BatchMoments(count, mean, variance * (count - 1))
        else:
            self.seen.add(count, mean, variance)

    def settle(self) -> None:
        """Update the layer's running statistics as one forward of the whole mini-batch would."""
        seen, layer = self.seen, self.layer
        self.forget()
        if seen is None or layer.running_mean is None or layer.running_var is None:
            return
        factor = layer.momentum
        if factor is None:
            factor = 1.0 / float(layer.num_batches_tracked or 1)
        for running, value in ((layer.running_mean, seen.mean), (layer.running_var, seen.spread / (seen.count - 1))):
            running.data.mul_(1 - factor).add_(value.to(running.dtype), alpha=factor)

    def forget(self) -> None:
        """Drop the moments. Count the run as one batch, however many micro-batches it had."""
        if self.batches is not None and self.layer.num_batches_tracked is not None:
            self.layer.num_batches_tracked.data.copy_(self.batches + (self.seen is not None))
        self.seen = self.batches = None


class DeferredNorms:
    """The deferred layers of one build."""

    def __init__(self, norms: Sequence[DeferredNorm] = ()) -> None:
        self.norms = tuple(norms)

    def forget(self) -> None:
        """Before a run, drop what a failed run recorded."""
        for norm in self.norms:
            norm.seen = None
            norm.forget()

    def settle(self) -> None:
        """After the forwards of a run, update the running statistics of all layers."""
        if not self.norms:
            return
        with torch.inference_mode(False), torch.no_grad():
            for norm in self.norms:
                norm.settle()


class DeferredBatchNorm(nn.Module):
    """Replacement of a BatchNorm layer in the graph of a stage."""

    def __init__(self, norm: DeferredNorm) -> None:
        super().__init__()
        self.layer, self.norm = norm.layer, norm

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Run the layer on empty statistics and record what it writes there."""
        layer = self.layer
        own = layer.running_mean, layer.running_var, layer.momentum
        mean, variance = self.norm.empty_statistics()
        try:
            layer.running_mean, layer.running_var, layer.momentum = mean, variance, 1.0
            output: torch.Tensor = layer(samples)
        finally:
            layer.running_mean, layer.running_var, layer.momentum = own
        self.norm.record(samples.detach(), mean, variance)
        return output


def norms_by_node(graph: fx.GraphModule, model: nn.Module) -> dict[fx.Node, BatchNorm]:
    """Return the nodes that update running statistics, each with its layer: a layer's call, or `F.batch_norm` on its buffers."""
    layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
    owners = {id(layer.running_mean): layer for layer in layers if layer.running_mean is not None}
    norms: dict[fx.Node, BatchNorm] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            module = graph.get_submodule(str(node.target))
            if isinstance(module, BatchNorm) and module.training and module.running_mean is not None:
                norms[node] = module
        elif node.op == "call_function" and node.target is F.batch_norm and _argument(node, 5, "training"):
            mean = _argument(node, 1, "running_mean")
            is_buffer = isinstance(mean, fx.Node) and mean.op == "get_attr"
            owner = owners.get(id(_attribute(graph, str(mean.target)))) if is_buffer else None
            if owner is not None:
                norms[node] = owner
    return {node: layer for node, layer in norms.items() if not is_synchronized(layer)}


def check_sync_batchnorm(model: nn.Module, batch_norm: str | None, dispatch: str) -> None:
    """Raise InputError if SyncBatchNorm layers of several processes are deferred, or run in threads, where they may deadlock.

    In one process they are BatchNorm layers like any other.
    """
    norms = ((n, module) for n, module in model.named_modules() if isinstance(module, BatchNorm))
    name = next((n for n, module in norms if is_synchronized(module)), None)
    deferred = batch_norm == "deferred"
    if name is not None and (deferred or dispatch == "threads"):
        raise InputError(
            "a SyncBatchNorm layer of several processes cannot be " + ("deferred" if deferred else "run in threads"),
            where=name,
            why="its statistics are those of other processes too"
            if deferred
            else "the stages of one process may meet those of another in different orders, and wait for ever",
            hint="batch_norm='each'" if deferred else "dispatch='inline'",
        )


def is_synchronized(layer: BatchNorm) -> bool:
    """Return whether the layer exchanges statistics with other processes."""
    if not isinstance(layer, nn.SyncBatchNorm) or not layer.training:
        return False
    group = layer.process_group
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size(group) > 1


def defer_norms(stages: Sequence[Stage], model: nn.Module) -> DeferredNorms:
    """Rewrite the stages so that their BatchNorm layers defer. The layers themselves remain the model's."""
    norms: dict[int, DeferredNorm] = {}
    for stage in stages:
        module = stage.module
        for node, layer in norms_by_node(module, model).items():
            norm = norms.setdefault(id(layer), DeferredNorm(layer))
            if node.op == "call_module":
                node.target = f"deferred_{node.name}"
                module.add_module(node.target, DeferredBatchNorm(norm))
            else:
                node.target = _deferred_function(norm)
        module.recompile()
    return DeferredNorms(tuple(norms.values()))


_SIGNATURE = inspect.signature(F.batch_norm)


def _deferred_function(norm: DeferredNorm) -> Any:
    """Return a replacement of `F.batch_norm` for a layer whose forward calls it itself."""

    def batch_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = _SIGNATURE.bind(*args, **kwargs)
        mean, variance = norm.empty_statistics()
        bound.arguments |= {"running_mean": mean, "running_var": variance, "momentum": 1.0}
        output = F.batch_norm(*bound.args, **bound.kwargs)
        norm.record(bound.arguments["input"].detach(), mean, variance)
        return output

    return batch_norm


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _attribute(module: nn.Module, path: str) -> Any:
    *parents, name = path.split(".")
    return getattr(module.get_submodule(".".join(parents)), name, None)
