"""Flags of recomputations: a checkpointed stage, or a region that the user checkpoints, runs its forward again for its backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import local

import torch

from pipecompile.torch_private.modes import active_fake_mode

__all__ = [
    "first_of_two_runs", "is_first_of_two_runs", "is_recomputing", "is_recomputing_region", "questions", "recomputation",
    "region_recomputation",
]  # fmt: skip


class _Flag(local):
    """The flags of a thread, and how often a user module has read `is_set`."""

    is_set = False
    is_region = False
    is_first = False
    questions = 0


_flag = _Flag()


def is_recomputing() -> bool:
    """Return whether a checkpointed stage runs its forward again, for a module that counts, logs or samples as it runs.

    The answer differs from run to run. So a submodule that calls this is kept whole as one node, like a submodule that
    branches on the value of a tensor. What it changes on itself in a recomputation stays.
    """
    if active_fake_mode() is not None:
        return bool(torch.zeros((), dtype=torch.bool))  # not known while recording: fails like a branch on a value
    _flag.questions += 1
    return _flag.is_set


def questions() -> int:
    """Return how often `is_recomputing` was called in this thread."""
    return _flag.questions


class _Flagged:
    """The context in which a flag of this thread is set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.before = getattr(_flag, self.name)
        setattr(_flag, self.name, True)

    def __exit__(self, *_: object) -> None:
        setattr(_flag, self.name, self.before)


def recomputation() -> AbstractContextManager[None]:
    """Return the context in which forwards of this thread are recomputations."""
    return _Flagged("is_set")


def region_recomputation() -> AbstractContextManager[None]:
    """Return the context in which forwards of this thread are recomputations of a user's region."""
    return _Flagged("is_region")


def first_of_two_runs() -> AbstractContextManager[None]:
    """Return the context in which forwards of this thread will be recomputed."""
    return _Flagged("is_first")


def is_recomputing_region() -> bool:
    """Return whether a region of the user's own `torch.utils.checkpoint` runs its forward again in this thread.

    The model itself writes its buffers again then, as it does outside of a pipeline.
    """
    return _flag.is_region


def is_first_of_two_runs() -> bool:
    """Return whether what this thread runs now will be recomputed."""
    return _flag.is_first
