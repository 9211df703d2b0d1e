"""The ranks of `tp`, which have parts of the same layers, compare a call before the ranks of a pipeline do: their layers send to each other.

    rank 0   pipe.step, training       ─┐ tp: unlike        ─┐
    rank 1   pipe.step, in eval mode   ─┘ "rank 1 is asked"  │ pp: rank 0 and rank 2 make unlike calls: an error on both
    rank 2   pipe.step, training       ─┐ tp: alike         ─┘     with what rank 1 was asked for
    rank 3   pipe.step, training       ─┘

A difference becomes a part of the call, so that the ranks of all stages raise for it, and all go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pipecompile.distributed.agreement.collective_call import COMPARED_PLACES, CollectiveCall
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.failures.failure_report import CopyDisagreement, ranks_of_texts

__all__ = ["TensorSiblings"]


class TensorSiblings:
    """The ranks that have parts of the layers of this rank. Without any, calls are not compared."""

    def __init__(self, communicator: Communicator) -> None:
        ranks = communicator.ranks
        self._group = None if ranks.tensor_group is None else CollectiveGroup(ranks.tensor_group, communicator)
        self._has_stages = ranks.size > 1

    def compared(self, call: CollectiveCall, *, is_due: bool) -> CollectiveCall:
        """Return the call, with what the ranks were asked for if that differs. Raise CopyDisagreement if no other ranks would compare it.

        All ranks of the group must call this together.
        """
        if self._group is None:
            return call
        contents = call.contents(is_due=is_due)[1:] if call.has_samples else [0] * COMPARED_PLACES
        with torch.inference_mode(False):
            rows = self._group.all_gather(torch.tensor([call.key, *contents], device="cpu")).tolist()
        others = len({row[0] for row in rows}) > 1
        if not others and not any(_are_unlike(row[1:], rows[0][1:]) for row in rows):
            return call
        texts = self._group.all_gather_text(str(call) if others else call.samples())
        if self._has_stages:
            own = texts[self._group.index]
            unlike = [(rank, text) for rank, text in zip(self._group.ranks, texts, strict=True) if text != own]
            beside = ranks_of_texts([rank for rank, _ in unlike], [text for _, text in unlike])
            return replace(call, modes=f"{call.modes} (beside it in tp, {beside})")
        raise CopyDisagreement(
            f"the ranks of tp {'are asked for different things' if others else 'have different samples in the same step'}",
            where=ranks_of_texts(self._group.ranks, texts),
            why="they compute parts of the same layers, and send to each other",
            hint="the call on every rank, in the same modes, and one batch for all ranks of tp",
        )


def _are_unlike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two ranks have other elements in all tensors that are not placeholders."""
    unlike = [a != b for a, b in zip(one, other, strict=True) if a & b & 1]
    return bool(unlike) and all(unlike)
