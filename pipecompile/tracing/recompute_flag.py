"""The flag of a recomputation: a checkpointed stage runs its forward again to have what its backward needs."""

from __future__ import annotations

from threading import local

import torch

from pipecompile.torch_private.modes import active_fake_mode

__all__ = ["is_recomputing", "recomputation"]


class _Flag(local):
    """The flag, one per thread."""

    is_set = False


_flag = _Flag()


def is_recomputing() -> bool:
    """Return whether a checkpointed stage runs its forward again, for a module that counts, logs or samples as it runs.

    The answer differs from run to run. So a submodule that calls this is kept whole as one node, like a submodule that
    branches on the value of a tensor.
    """
    if active_fake_mode() is not None:
        return bool(torch.zeros((), dtype=torch.bool))  # not known while recording: fails like a branch on a value
    return _flag.is_set


class recomputation:  # noqa: N801 a context manager, named like a function
    """The context in which forwards of this thread are recomputations."""

    def __enter__(self) -> None:
        self.before, _flag.is_set = _flag.is_set, True

    def __exit__(self, *_: object) -> None:
        _flag.is_set = self.before
