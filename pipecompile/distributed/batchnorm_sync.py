"""BatchNorm across the replicas of a pipeline: deferred statistics of the whole batch, and checks of SyncBatchNorm layers.

replica 0    n, mean, squared deviations of its part  ─┐
replica 1    n, mean, squared deviations of its part  ─┴─► n, mean, squared deviations of the batch, on both, once a step

Parts are merged as by Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.errors import InputError
from pipecompile.graph.cross_sample import is_synchronized
from pipecompile.runtime.cells.deferred_batchnorm import BatchMoments, DeferredNorms
from pipecompile.torch_private.modules import BatchNorm, InstanceNorm, sync_check_input_dim

__all__ = ["ReplicatedNorms", "check_sync_groups", "sync_batchnorm_layers", "without_sync"]


def sync_batchnorm_layers(model: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    """Return, by name, the layers of a model that exchange statistics with other processes."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
    return {name: layer for name, layer in layers.items() if is_synchronized(layer)}


def check_sync_groups(layers: dict[str, nn.SyncBatchNorm], replicas: dist.ProcessGroup | None) -> None:
    """Raise InputError for a layer whose process group has other ranks than those that run its stage."""
    with_stage = {dist.get_rank()} if replicas is None else set(dist.get_process_group_ranks(replicas))
    for name, layer in layers.items():
        in_group = set(dist.get_process_group_ranks(layer.process_group or dist.group.WORLD))
        if in_group != with_stage:
            raise InputError(
                f"a SyncBatchNorm layer is of ranks {sorted(in_group)}",
                where=name,
                why=f"ranks {sorted(with_stage)} run its stage; the layer would wait for the others for ever",
                hint='nn.SyncBatchNorm.convert_sync_batchnorm(model, mesh.get_group("dp"))',
            )


class LocalBatchNorm(BatchNorm):
    """A SyncBatchNorm layer that normalises by the samples of this process alone."""

    _check_input_dim = sync_check_input_dim


LocalBatchNorm.__module__ = (
    nn.SyncBatchNorm.__module__
)  # the recorder takes it for a layer of torch, as SyncBatchNorm is


@contextmanager
def without_sync(layers: Sequence[nn.SyncBatchNorm]) -> Iterator[None]:
    """Let layers compute without other processes in this context: while a model is recorded or measured."""
    kinds = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = LocalBatchNorm  # type: ignore[assignment]
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind


class ReplicatedNorms(DeferredNorms):
    """The deferred layers of one build. All `replicas` observe the same layers: those of this rank's stages."""

    def __init__(self, norms: DeferredNorms, replicas: CollectiveGroup) -> None:
        super().__init__(norms.norms, norms.links)
        self.replicas = replicas

    def settle(self) -> None:
        """Merge the statistics of all replicas, then update the running statistics."""
        updated = [(call, call.seen) for norm in self.norms for call in norm.calls if call.seen is not None]
        if updated:
            with torch.inference_mode(False), torch.no_grad():
                rows = self.replicas.all_gather(torch.cat([_row(seen) for _, seen in updated]))
                widths = [1 + 2 * len(seen.mean) for _, seen in updated]
                for (call, _), parts in zip(updated, rows.split_with_sizes(widths, 1), strict=True):
                    call.seen = _averaged(parts) if isinstance(call.layer, InstanceNorm) else _merged(parts)
        super().settle()


def _row(seen: BatchMoments) -> torch.Tensor:
    """Return count, means and squared deviations as `(1 + 2 * channels,)`."""
    return torch.cat([seen.mean.new_tensor([seen.count]), seen.mean, seen.spread])


def _averaged(rows: torch.Tensor) -> BatchMoments:
    """Average the statistics of one InstanceNorm layer, from a row as in `_merged`."""
    shares = rows[:, :1] / rows[:, 0].sum()
    mean, variance = (shares * rows[:, 1:]).sum(0).chunk(2)
    return BatchMoments(float(rows[:, 0].sum()), mean, variance)


def _merged(rows: torch.Tensor) -> BatchMoments:
    """Merge the statistics of one layer, from a row `(replicas, 1 + 2 * channels)` of each replica."""
    channels = rows.shape[1] // 2
    counts, means, spreads = rows.split_with_sizes([1, channels, channels], 1)
    total = float(counts.sum())
    mean = (counts * means).sum(0) / total
    return BatchMoments(total, mean, spreads.sum(0) + (counts * (means - mean).square()).sum(0))
