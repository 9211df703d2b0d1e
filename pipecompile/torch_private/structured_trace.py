"""The structured trace of torch, which `TORCH_TRACE=directory` switches on and tlparse reads."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_structured

__all__ = ["add_artifact"]


def add_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text under a name, by the rules of torch's own artifacts. 2.11."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
