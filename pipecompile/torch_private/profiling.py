"""Whether a profiler of torch records in this process."""

from __future__ import annotations

from torch.autograd import profiler

__all__ = ["is_profiling"]


def is_profiling() -> bool:
    """Return whether `torch.profiler.profile` or `torch.autograd.profiler.profile` is on. 2.11."""
    return bool(profiler._is_profiler_enabled)
