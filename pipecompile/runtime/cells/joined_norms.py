"""Deferred BatchNorm in a run of several recordings: the statistics of all their micro-batches, updated once.

recording 1    bn: call 0, call 1     ◄──┐ take the statistics of the same call of the layer
recording 2    bn: call 0, call 1     ───┘
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.errors import InputError
from pipecompile.runtime.cells.deferred_batchnorm import DeferredCall, DeferredNorm, DeferredNorms

__all__ = ["joined_norms"]


def joined_norms(variants: Sequence[DeferredNorms]) -> DeferredNorms:
    """Return the deferred layers of all recordings as those of one.

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
