"""The values with which the ranks of a pipeline begin: each stage begins with those of its own rank, so other ranks should have the same.

    rank 0   0.weight a1  2.weight 07     stage 0 begins with 0.weight of rank 0 ─┐
    rank 1   0.weight 5c  2.weight 07     stage 1 begins with 2.weight of rank 1 ─┴─► a warning on both that names 0.weight

Sixteen elements of each tensor are compared, before the model is cut, and of tensors that are new in a model that was changed, before it is
cut again: what is made from a trained weight on all ranks is right on the rank of that weight alone. What has no values yet, or equal
elements, is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch

from pipecompile.distributed.agreement.collective_call import hash_of, may_be_placeholder, sample_of
from pipecompile.distributed.communicator import Communicator
from pipecompile.errors import RecordingWarning
from pipecompile.tracing.user_source import warn

__all__ = ["warn_of_other_values"]

_SHOWN = 3
"""Tensors that the warning names."""

_FIRST = (
    "Try torch.manual_seed(0) before the model is built, or the same checkpoint, on every rank; after training with another pipeline, "
    "model.load_state_dict(pipe.full_state_dict()) before compile"
)
_LATER = (
    "They are new since the model was cut. Try torch.manual_seed(0) before they are made, on every rank; where they are made from trained "
    "weights, of which a rank has its own alone, pipe.model.load_state_dict(pipe.full_state_dict()) before"
)


def warn_of_other_values(
    communicator: Communicator, named: Iterable[tuple[str, torch.Tensor]], *, is_first: bool = True
) -> None:
    """Warn, on all ranks of this copy of the pipeline, if these tensors have other values on some. They must call this together.

    Without `is_first` they are new in a model that had been cut before.
    """
    if communicator.ranks.size == 1:
        return
    own = _numbers(named)
    texts = communicator.all_gather_text("first values", f"{hash_of(str(own))}", in_copy=True)
    if len(set(texts)) == 1:
        return
    rows = [json.loads(text) for text in communicator.all_gather_text("values", json.dumps(own), in_copy=True)]
    if names := _other_names(rows):
        warn(_text(names, len(own)) + (_FIRST if is_first else _LATER), RecordingWarning)


def _numbers(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return a number per tensor that has values, which is equal for equal elements."""
    samples = [(name, sample_of(tensor, is_due=True), tensor) for name, tensor in named]
    told = [(name, sample) for name, sample, tensor in samples if sample and not may_be_placeholder(sample, tensor)]
    return {name: hash_of(sample.hex()) for name, sample in told}


def _other_names(rows: list[Mapping[str, int]]) -> list[str]:
    """Return the names of the tensors that have other values on some rank, of those that all have."""
    common = [name for name in rows[0] if all(name in row for row in rows)]
    return [name for name in common if len({row[name] for row in rows}) > 1]


def _text(names: list[str], count: int) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"the ranks begin with other values of {', '.join(names[:_SHOWN])}{more}, of {count} tensors: each stage begins with those of its "
        f"own rank, so the model is that of no rank. "
    )
