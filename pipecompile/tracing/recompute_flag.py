"""Is this forward run a second time, only to have what its backward needs?"""

from __future__ import annotations

from threading import local

import torch

from pipecompile.torch_private.modes import active_fake_mode

__all__ = ["is_recomputing", "recomputation"]


class _Here(local):
    """One per thread."""

    now = False


_here = _Here()


def is_recomputing() -> bool:
    """Whether a checkpointed stage runs its forward again, for a module that counts, logs or samples as it runs.

    Each run answers for itself, so a submodule that asks is kept whole, as one that decides by the value of a tensor is.
    """
    if active_fake_mode() is not None:
        return bool(torch.zeros((), dtype=torch.bool))  # nobody knows while it is recorded
    return _here.now


class recomputation:  # noqa: N801 used as a context, as a function is
    """In this block, and in this thread, forwards are recomputations."""

    def __enter__(self) -> None:
        self.before, _here.now = _here.now, True

    def __exit__(self, *_: object) -> None:
        _here.now = self.before
