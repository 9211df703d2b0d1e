"""The weights of a rank, and the buffers that it only reads, beside those of the same rank of other copies of the pipeline: they are equal,
bit for bit, until a script changes them on one copy alone.

copy 0, rank 1   2.weight  digest a ─┐
                                     ├─► in the row that the copies exchange before a step; a warning on all of them
copy 1, rank 3   2.weight  digest b ─┘   with the names, since the step of an optimizer was skipped, or other weights were loaded
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from pipecompile.distributed.agreement.collective_call import hash_of, sample_of
from pipecompile.distributed.agreement.update_differences import UpdateDifferences
from pipecompile.distributed.agreement.weight_updates import Updates
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.failures.failure_report import ranks_of_texts
from pipecompile.errors import RecordingWarning
from pipecompile.tracing.user_source import warn

__all__ = ["WeightsOfCopies", "shortened"]

_PROBED = 4
"""Parameters and buffers of which elements are compared in each step; those of all are in steps 1, 2, 4, 8 ..."""

_SHOWN = 3
"""Names that a message has."""

_EXCHANGES = 8
"""Differences that are looked at in each step; later ones are in steps 16, 32, 64 ..."""

_BITS = 48
"""Bits of a digest, which float64 has exactly."""


class WeightsOfCopies:
    """The comparison of one rank, step after step. Other values are told once, and others are expected from then on."""

    def __init__(self) -> None:
        self._steps, self._exchanges, self._is_told = 0, 0, False
        self.named: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple  # set by the pipeline
        self.buffers: Callable[[], Sequence[torch.Tensor]] = tuple  # set by the pipeline
        self.updates: Callable[[], Updates | None] = lambda: None  # set by the pipeline
        self._updates: Updates | None = None
        self._differences = UpdateDifferences()

    def row(self, parameters: Sequence[nn.Parameter]) -> tuple[float, float]:
        """Return the number of this step and a digest of the parameters, buffers and updates; 0 if none is compared."""
        self._steps += 1
        self._updates = self.updates()
        is_due = self._steps & (self._steps - 1) == 0
        if self._exchanges >= _EXCHANGES and not is_due:
            return float(self._steps), 0.0
        samples = [] if self._is_told else self._samples([*parameters, *self.buffers()], is_due=is_due)
        key = None if self._updates is None else self._updates.key
        return float(self._steps), float(hash_of(f"{samples} {key}") % 2**_BITS)

    def _samples(self, tensors: Sequence[torch.Tensor], *, is_due: bool) -> list[bytes | None]:
        some = tensors if is_due else tensors[:: max(len(tensors) // _PROBED, 1)]
        return [sample_of(tensor, is_due=is_due) for tensor in some]

    def compare(
        self, group: CollectiveGroup, rows: Sequence[tuple[float, float]], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Warn, on the same rank of all copies, if the rows of one step differ. All copies call this together."""
        if len({step for step, _ in rows}) > 1 or len(set(rows)) == 1:
            return
        self._exchanges += 1
        own = self._numbers(parameters)
        updates = self._updates.to_json() if self._updates else ""
        found = [json.loads(text) for text in group.all_gather_text(json.dumps([own, updates]))]
        self._differences.warn(group.ranks, [Updates.from_json(text) if text else None for _, text in found])
        shared = [name for name in own if all(name in row for row, _ in found)]  # copies may have recorded other modes
        others = [name for name in shared if len({row[name] for row, _ in found}) > 1]
        if others and not self._is_told:
            self._is_told = True
            kinds = _kinds([str([row[name] for name in others]) for row, _ in found])
            warn(_text(others, ranks_of_texts(group.ranks, kinds)), RecordingWarning)

    def _numbers(self, parameters: Sequence[nn.Parameter]) -> dict[str, int]:
        """Return a number per parameter and buffer, which is equal for equal elements."""
        names, tensors = {id(one): name for name, one in self.named()}, (*parameters, *self.buffers())
        return {names[id(one)]: hash_of(str(sample_of(one, is_due=True))) for one in tensors if id(one) in names}


def _kinds(texts: Sequence[str]) -> list[str]:
    """Return a number, in words, for each text, equal for equal texts."""
    known = [*dict.fromkeys(texts)]
    return [f"values {known.index(text) + 1}" for text in texts]


def shortened(names: Sequence[str]) -> str:
    """Return a few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _text(names: Sequence[str], ranks: str) -> str:
    return (
        f"the copies of the pipeline have other values of {shortened(names)}: {ranks}. Their gradients are added up as those of "
        "one model. Try the same optimizer.step() and load_state_dict on all copies, not under `if rank == 0`, and one seed for what changes "
        "weights at random; pipe.load_state_dict of one checkpoint on all makes them equal"
    )
