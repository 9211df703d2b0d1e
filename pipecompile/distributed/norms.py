"""Deferred BatchNorm with copies of a pipeline: running statistics of the whole batch, put together once a step.

copy 0    n, mean, squared deviations of its part  ─┐
copy 1    n, mean, squared deviations of its part  ─┴─► those of the batch ─► the same running statistics on both
"""

from __future__ import annotations

import torch

from pipecompile.distributed.circles import Circle
from pipecompile.runtime.batchnorm import Norms, Seen

__all__ = ["SharedNorms"]


class SharedNorms(Norms):
    """The deferred layers of one build. All copies saw the same layers, those of this rank's stages."""

    def __init__(self, norms: Norms, copies: Circle) -> None:
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
