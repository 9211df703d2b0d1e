"""Statistics of normalisation layers over the micro-batches of a mini-batch, merged for all layers at once.

    micro-batch 0    layer 0: n, mean, variance     layer 1: n, mean, variance    ...   ─► kept as they are, while cells run
    micro-batch 1    ...                                                                ─► merged after the run

A merge is a dozen kernels per micro-batch on a GPU, for all layers together. Counts, means and squared deviations are merged as by Chan,
Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979, in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from pipecompile.torch_private.storages import foreach_add, foreach_mul, foreach_sub

__all__ = ["BatchMoments", "Observations", "merge_all"]


@dataclass(slots=True)
class BatchMoments:
    """Statistics of one layer over the values of a mini-batch so far, per channel.

    count     values per channel
    mean      their mean, `(channels,)`
    spread    the sum of their squared deviations from the mean, `(channels,)`; of averaged samples, the mean of their variances
    """

    count: float
    mean: torch.Tensor
    spread: torch.Tensor


Part = tuple[float, torch.Tensor, torch.Tensor]
"""Values per channel of a micro-batch, their mean and their unbiased variance, `(channels,)` each; of averaged samples, how many."""


@dataclass(slots=True)
class Observations:
    """Statistics of one call of a layer: `moments` of the micro-batches that are merged, and `parts` of those that are not yet.

    `is_averaged`: each sample is normalised by itself, and the statistics of samples are averaged.
    """

    is_averaged: bool
    moments: BatchMoments | None = None
    parts: list[Part] = field(default_factory=list)

    def merged(self) -> BatchMoments | None:
        """Return the statistics of all observations; None without any."""
        merge_all([self])
        return self.moments


def merge_all(observations: Iterable[Observations]) -> None:
    """Merge the parts of many layers into their moments, those of one device together."""
    groups: dict[Hashable, list[Observations]] = {}
    for one in observations:
        if one.parts:
            groups.setdefault((one.parts[0][1].device, one.is_averaged), []).append(one)
    for group in groups.values():
        while group:
            _merge_first(group)
            group[:] = [one for one in group if one.parts]


def _merge_first(group: Sequence[Observations]) -> None:
    """Merge the first part of each."""
    parts = [one.parts.pop(0) for one in group]
    counts = [count for count, _, _ in parts]
    means, variances = _doubles([mean for _, mean, _ in parts]), _doubles([variance for _, _, variance in parts])
    begun = [place for place, one in enumerate(group) if one.moments is not None]
    new = [place for place, one in enumerate(group) if one.moments is None]
    for places, combine in ((begun, _averaged if group[0].is_averaged else _added), (new, _first)):
        if places:
            chosen = [[column[place] for place in places] for column in (means, variances)]
            own = [group[place] for place in places]
            for one, moments in zip(own, combine(own, [counts[place] for place in places], *chosen), strict=True):
                one.moments = moments


def _doubles(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in float64."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).double()
    return list(flat.split_with_sizes([len(one) for one in tensors]))


Tensors = Sequence[torch.Tensor]


def _first(
    group: Sequence[Observations], counts: Sequence[float], means: Tensors, variances: Tensors
) -> list[BatchMoments]:
    is_averaged = group[0].is_averaged
    spreads = variances if is_averaged else foreach_mul(variances, [count - 1 for count in counts])
    return [BatchMoments(*each) for each in zip(counts, means, spreads, strict=True)]


def _added(
    group: Sequence[Observations], counts: Sequence[float], means: Tensors, variances: Tensors
) -> list[BatchMoments]:
    seen = [one.moments for one in group if one.moments is not None]
    totals = [one.count + count for one, count in zip(seen, counts, strict=True)]
    weights = [one.count * count / total for one, count, total in zip(seen, counts, totals, strict=True)]
    differences = foreach_sub(means, [one.mean for one in seen])
    within = foreach_mul(variances, [count - 1 for count in counts])
    between = foreach_mul(foreach_mul(differences, differences), weights)
    spreads = foreach_add([one.spread for one in seen], foreach_add(within, between))
    shifts = foreach_mul(differences, [count / total for count, total in zip(counts, totals, strict=True)])
    merged = foreach_add([one.mean for one in seen], shifts)
    return [BatchMoments(*each) for each in zip(totals, merged, spreads, strict=True)]


def _averaged(
    group: Sequence[Observations], counts: Sequence[float], means: Tensors, variances: Tensors
) -> list[BatchMoments]:
    seen = [one.moments for one in group if one.moments is not None]
    totals = [one.count + count for one, count in zip(seen, counts, strict=True)]
    before = [one.count / total for one, total in zip(seen, totals, strict=True)]
    now = [count / total for count, total in zip(counts, totals, strict=True)]
    mean, variance = (
        foreach_add(foreach_mul(old, before), foreach_mul(new, now))
        for old, new in (([one.mean for one in seen], means), ([one.spread for one in seen], variances))
    )
    return [BatchMoments(*each) for each in zip(totals, mean, variance, strict=True)]
