"""The agreement of the ranks before a step, over the control group: that they run it alike, and whether layouts still hold.

    rank 1 ──[common, own]──► rank 0 ──[are all `common` equal, number of all `own`]──► rank 1, rank 2
    rank 2 ──[common, own]──►

`common` is what must be equal on all ranks: the program and the sizes of the micro-batches. `own` is what may differ between ranks
but decides layouts, such as which parameters have gradients: a step in which all are as before finds the layouts of before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipecompile.distributed.agreement.collective_call import hash_of
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.failures.failure_report import CopyDisagreement, ranks_of_texts
from pipecompile.errors import PlanError

__all__ = ["agree_on_step", "ranks_by_text", "shared_from", "texts_of_ranks"]

_STEP, _AGREED, _TEXT, _TEXTS = "step", "step agreed", "text of the step", "texts of the step"


def agree_on_step(communicator: Communicator, common: str, own: str) -> int:
    """Return a number that is equal in two steps if what all ranks have as `own` is equal. All ranks must call this together.

    Raises PlanError, on all ranks, unless all have the same `common`; RankLost for a rank that failed.
    """
    numbers = torch.tensor([hash_of(common), hash_of(own)], device="cpu")
    peers = range(1, communicator.ranks.size)
    if communicator.ranks.index == 0:
        for peer in peers:
            communicator.expect(peer, [_STEP])
        rows = [numbers, *(communicator.receive(peer, _STEP) for peer in peers)]
        all_own = str([int(row[1]) for row in rows])
        verdict = torch.tensor([len({int(row[0]) for row in rows}) == 1, hash_of(all_own)], device="cpu")
        for peer in peers:
            communicator.send(peer, _AGREED, verdict)
    else:
        communicator.expect(0, [_AGREED])
        communicator.send(0, _STEP, numbers)
        verdict = communicator.receive(0, _AGREED)
    is_agreed, number = verdict.tolist()
    if not is_agreed:
        raise _disagreement(communicator, common)
    return int(number)


def shared_from(communicator: Communicator, source: int, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the `value` that pipeline device `source` has, on all ranks of a pipeline. All must call this together."""
    if communicator.ranks.index != source:
        communicator.expect(source, [name])
        received: torch.Tensor = communicator.receive(source, name)
        return received
    for peer in range(communicator.ranks.size):
        if peer != source:
            communicator.send(peer, name, value)
    return value


def _disagreement(communicator: Communicator, common: str) -> PlanError:
    """Return the error that names who has what."""
    return CopyDisagreement(
        "the ranks disagree about the step",
        where=ranks_by_text(communicator, texts_of_ranks(communicator, common)),
        why="every rank receives into memory of the sizes that it has itself",
        hint="a batch of the same shape on every rank of a pipeline",
    )


def ranks_by_text(communicator: Communicator, texts: Sequence[str]) -> str:
    """Return who has which of the `texts` of the ranks of a pipeline."""
    return ranks_of_texts(map(communicator.ranks.rank_of, range(len(texts))), texts)


def texts_of_ranks(communicator: Communicator, text: str) -> list[str]:
    """Return the texts of all ranks of a pipeline, which must call this together."""
    peers = range(1, communicator.ranks.size)
    texts: Any
    if communicator.ranks.index != 0:
        communicator.send(0, _TEXT, text, once=True)
        texts = communicator.receive(0, _TEXTS, once=True)
    else:
        texts = [text, *(communicator.receive(peer, _TEXT, once=True) for peer in peers)]
        for peer in peers:
            communicator.send(peer, _TEXTS, texts, once=True)
    communicator.flush()
    return list(texts)
