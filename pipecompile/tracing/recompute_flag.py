"""Flags of recomputations: a checkpointed stage, or a region that the user checkpoints, runs its forward again for its backward."""

from __future__ import annotations

from threading import local

import torch

from pipecompile.torch_private.modes import active_fake_mode

__all__ = [
    "first_of_two_runs", "is_first_of_two_runs", "is_recomputing", "is_recomputing_region", "questions", "recomputation",
    "region_recomputation",
]  # fmt: skip


class _Depths(local):
    """In how many blocks of each context a thread is, and how often a user module has asked."""

    stage = 0
    region = 0
    first = 0
    questions = 0


_depths = _Depths()


def is_recomputing() -> bool:
    """Return whether a checkpointed stage runs its forward again, for a module that counts, logs or samples as it runs.

    The answer differs from run to run. So a submodule that calls this is kept whole as one node, like a submodule that
    branches on the value of a tensor. What it changes on itself in a recomputation stays.
    """
    if active_fake_mode() is not None:
        return bool(torch.zeros((), dtype=torch.bool))  # not known while recording: fails like a branch on a value
    _depths.questions += 1
    return _depths.stage > 0


def questions() -> int:
    """Return how often `is_recomputing` was called in this thread."""
    return _depths.questions


class _Nested:
    """A context in whose blocks a thread notes how many of them it is in. One object serves all threads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        setattr(_depths, self._name, getattr(_depths, self._name) + 1)

    def __exit__(self, *_: object) -> None:
        setattr(_depths, self._name, getattr(_depths, self._name) - 1)


recomputation = _Nested("stage")
"""The context in which forwards of this thread are recomputations."""

region_recomputation = _Nested("region")
"""The context in which forwards of this thread are recomputations of a user's region."""

first_of_two_runs = _Nested("first")
"""The context in which forwards of this thread will be recomputed."""


def is_recomputing_region() -> bool:
    """Return whether a region of the user's own `torch.utils.checkpoint` runs its forward again in this thread.

    The model itself writes its buffers again then, as it does outside of a pipeline.
    """
    return _depths.region > 0


def is_first_of_two_runs() -> bool:
    """Return whether what this thread runs now will be recomputed."""
    return _depths.first > 0
