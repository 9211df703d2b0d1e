"""Diagnostics of torch: its profilers, and its structured trace, which `TORCH_TRACE=directory` switches on and tlparse reads."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_structured
from torch.autograd import profiler

__all__ = ["add_artifact", "is_profiling"]


def is_profiling() -> bool:
    """Return whether `torch.profiler.profile` or `torch.autograd.profiler.profile` is on. 2.11."""
    return bool(profiler._is_profiler_enabled)


def add_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text under a name, by the rules of torch's own artifacts. 2.11."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
