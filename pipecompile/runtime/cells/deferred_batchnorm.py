"""Deferred BatchNorm: running statistics of the whole mini-batch, updated once a step instead of once a micro-batch.

    micro-batch    n, mean, squared deviations  ─┐
    micro-batch    n, mean, squared deviations  ─┼─► those of the mini-batch ─► running mean, running variance, one count
    micro-batch    n, mean, squared deviations  ─┘

Each micro-batch is still normalised by itself. A layer runs as it is, hooks and all, with empty statistics lent to it and
momentum 1, so that it leaves there what it saw. Parts are put together as by Chan, Golub and LeVeque, "Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances", 1979; the variance is unbiased for the number of samples that there were.
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

__all__ = ["DeferredNorm", "Norms", "check_alone", "defer_norms", "speaks", "updating_norms"]


@dataclass(slots=True)
class Seen:
    """Of one layer in this mini-batch: values per channel, their mean, and the sum of their squared deviations."""

    count: float
    mean: torch.Tensor
    spread: torch.Tensor

    def add(self, count: float, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """The values of one more micro-batch; `variance` is the unbiased one."""
        total, difference = self.count + count, mean - self.mean
        self.spread += variance * (count - 1) + difference.square() * (self.count * count / total)
        self.mean = self.mean + difference * (count / total)
        self.count = total


class Norm:
    """One BatchNorm layer, and what it saw since it was last settled."""

    def __init__(self, layer: BatchNorm) -> None:
        self.layer = layer
        self.seen: Seen | None = None
        self.counted: torch.Tensor | None = None

    def lent(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Empty statistics for a run of the layer."""
        if self.counted is None and self.layer.num_batches_tracked is not None:
            self.counted = self.layer.num_batches_tracked.clone()
        assert self.layer.running_mean is not None
        assert self.layer.running_var is not None
        return torch.zeros_like(self.layer.running_mean), torch.ones_like(self.layer.running_var)

    def note(self, samples: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """What a run with momentum 1 left in the statistics lent to it. One that is recomputed was noted already."""
        if is_recomputing():
            return
        count, mean, variance = samples.numel() / samples.shape[1], mean.double(), variance.double()
        if self.seen is None:
            self.seen = Seen(count, mean, variance * (count - 1))
        else:
            self.seen.add(count, mean, variance)

    def settle(self) -> None:
        """Update the layer's own statistics, as one forward of the whole mini-batch would."""
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
        """Drop what was seen; a run counts as one batch however many micro-batches it had."""
        if self.counted is not None and self.layer.num_batches_tracked is not None:
            self.layer.num_batches_tracked.data.copy_(self.counted + (self.seen is not None))
        self.seen = self.counted = None


class Norms:
    """The deferred layers of one build."""

    def __init__(self, norms: Sequence[Norm] = ()) -> None:
        self.norms = tuple(norms)

    def forget(self) -> None:
        """Before a run: what a failed one left is dropped."""
        for norm in self.norms:
            norm.seen = None
            norm.forget()

    def settle(self) -> None:
        """After the forwards of a run."""
        if not self.norms:
            return
        with torch.inference_mode(False), torch.no_grad():
            for norm in self.norms:
                norm.settle()


class DeferredNorm(nn.Module):
    """In the place of a layer in the graph of a stage."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.layer, self.norm = norm.layer, norm

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        own = layer.running_mean, layer.running_var, layer.momentum
        mean, variance = self.norm.lent()
        try:
            layer.running_mean, layer.running_var, layer.momentum = mean, variance, 1.0
            made: torch.Tensor = layer(samples)
        finally:
            layer.running_mean, layer.running_var, layer.momentum = own
        self.norm.note(samples.detach(), mean, variance)
        return made


def updating_norms(graph: fx.GraphModule, model: nn.Module) -> dict[fx.Node, BatchNorm]:
    """The nodes that update a layer's running statistics: the layer of the model itself, or `F.batch_norm` on its buffers."""
    layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
    owners = {id(layer.running_mean): layer for layer in layers if layer.running_mean is not None}
    found: dict[fx.Node, BatchNorm] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            module = graph.get_submodule(str(node.target))
            if isinstance(module, BatchNorm) and module.training and module.running_mean is not None:
                found[node] = module
        elif node.op == "call_function" and node.target is F.batch_norm and _argument(node, 5, "training"):
            mean = _argument(node, 1, "running_mean")
            is_buffer = isinstance(mean, fx.Node) and mean.op == "get_attr"
            owner = owners.get(id(_attribute(graph, str(mean.target)))) if is_buffer else None
            if owner is not None:
                found[node] = owner
    return {node: layer for node, layer in found.items() if not speaks(layer)}


def check_alone(model: nn.Module, batch_norm: str | None, dispatch: str) -> None:
    """Raise InputError when SyncBatchNorm layers would meet other processes in a way that is wrong, or waits for ever. In one
    process they are BatchNorm layers like any other.
    """
    name = next((n for n, module in model.named_modules() if isinstance(module, BatchNorm) and speaks(module)), None)
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


def speaks(layer: BatchNorm) -> bool:
    """Does it exchange statistics with other processes?"""
    if not isinstance(layer, nn.SyncBatchNorm) or not layer.training:
        return False
    group = layer.process_group
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size(group) > 1


def defer_norms(stages: Sequence[Stage], model: nn.Module) -> Norms:
    """Rewrite the stages so that their BatchNorm layers defer. The layers stay the model's own."""
    norms: dict[int, Norm] = {}
    for stage in stages:
        module = stage.module
        for node, layer in updating_norms(module, model).items():
            norm = norms.setdefault(id(layer), Norm(layer))
            if node.op == "call_module":
                node.target = f"deferred_{node.name}"
                module.add_module(node.target, DeferredNorm(norm))
            else:
                node.target = _deferred(norm)
        module.recompile()
    return Norms(tuple(norms.values()))


_SIGNATURE = inspect.signature(F.batch_norm)


def _deferred(norm: Norm) -> Any:
    """`F.batch_norm` for a layer whose forward calls it itself."""

    def batch_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = _SIGNATURE.bind(*args, **kwargs)
        mean, variance = norm.lent()
        given.arguments |= {"running_mean": mean, "running_var": variance, "momentum": 1.0}
        made = F.batch_norm(*given.args, **given.kwargs)
        norm.note(given.arguments["input"].detach(), mean, variance)
        return made

    return batch_norm


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _attribute(module: nn.Module, path: str) -> Any:
    *parents, name = path.split(".")
    return getattr(module.get_submodule(".".join(parents)), name, None)
