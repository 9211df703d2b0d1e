"""The levels of a compilation as artifacts of torch's structured trace: `TORCH_TRACE=directory python train.py`, then `tlparse`.

prepare   ─► pipecompile_graph      as graph.txt of a dump
partition ─► pipecompile_plan       as plan.json
lower     ─► pipecompile_program    as program.txt
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipecompile.torch_private.structured_trace import add_artifact

__all__ = ["trace_phase"]

_ARTIFACTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "prepare": ("graph", str),
    "partition": ("plan", lambda partitioned: str(partitioned.plan.to_json())),
    "lower": ("program", str),
}
"""By phase the name of its level, and the function that writes it."""


def trace_phase(phase: str, result: Any) -> None:
    """Add the result of a phase as an artifact, if it is a level."""
    if phase in _ARTIFACTS:
        level, write = _ARTIFACTS[phase]
        add_artifact(f"pipecompile_{level}", lambda: write(result))
