"""Deferred BatchNorm with copies of a pipeline: running statistics of the whole batch, put together once a step.

copy 0    n, mean, squared deviations of its part  ─┐
copy 1    n, mean, squared deviations of its part  ─┴─► those of the batch ─► the same running statistics on both
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.errors import InputError
from pipecompile.runtime.cells.deferred_batchnorm import Norms, Seen, speaks
from pipecompile.torch_private.modules import BatchNorm, sync_check_input_dim

__all__ = ["ReplicatedNorms", "check_sync_groups", "without_sync", "sync_batchnorm_layers"]


def sync_batchnorm_layers(model: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    """The layers that exchange statistics with other processes."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
    return {name: layer for name, layer in layers.items() if speaks(layer)}


def check_sync_groups(layers: dict[str, nn.SyncBatchNorm], copies: dist.ProcessGroup | None) -> None:
    """Raise InputError for a layer that would wait for ranks that do not have it."""
    having = {dist.get_rank()} if copies is None else set(dist.get_process_group_ranks(copies))
    for name, layer in layers.items():
        asked = set(dist.get_process_group_ranks(layer.process_group or dist.group.WORLD))
        if asked != having:
            raise InputError(
                f"a SyncBatchNorm layer is of ranks {sorted(asked)}",
                where=name,
                why=f"ranks {sorted(having)} have its stage, the others it would wait for in vain",
                hint='nn.SyncBatchNorm.convert_sync_batchnorm(model, mesh.get_group("dp"))',
            )


class LocalBatchNorm(BatchNorm):
    """What a SyncBatchNorm is meanwhile."""

    _check_input_dim = sync_check_input_dim


LocalBatchNorm.__module__ = nn.SyncBatchNorm.__module__  # it is recorded as what it stands for: a layer of torch


@contextmanager
def without_sync(layers: Sequence[nn.SyncBatchNorm]) -> Iterator[None]:
    """In this context the layers wait for nobody."""
    kinds = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = LocalBatchNorm  # type: ignore[assignment]
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind


class ReplicatedNorms(Norms):
    """The deferred layers of one build. All copies saw the same layers, those of this rank's stages."""

    def __init__(self, norms: Norms, copies: CollectiveGroup) -> None:
        super().__init__(norms.norms)
        self.copies = copies

    def settle(self) -> None:
        found = [(norm, norm.seen) for norm in self.norms if norm.seen is not None]
        if found:
            with torch.inference_mode(False), torch.no_grad():
                rows = self.copies.rows(torch.cat([_row(seen) for _, seen in found]))
                widths = [1 + 2 * len(seen.mean) for _, seen in found]
                for (norm, _), parts in zip(found, rows.split_with_sizes(widths, 1), strict=True):
                    norm.seen = _joined(parts)
        super().settle()


def _row(seen: Seen) -> torch.Tensor:
    return torch.cat([seen.mean.new_tensor([seen.count]), seen.mean, seen.spread])


def _joined(rows: torch.Tensor) -> Seen:
    """What all copies saw of one layer, from a row of each."""
    channels = rows.shape[1] // 2
    counts, means, spreads = rows.split_with_sizes([1, channels, channels], 1)
    total = float(counts.sum())
    mean = (counts * means).sum(0) / total
    return Seen(total, mean, spreads.sum(0) + (counts * (means - mean).square()).sum(0))
