"""The levels of a compilation as artifacts of torch's structured trace: `TORCH_TRACE=directory python train.py`, then `tlparse`.

prepare   ─► pipecompile_graph      as graph.txt of a dump
partition ─► pipecompile_plan       as plan.json
lower     ─► pipecompile_program    as program.txt
"""

from __future__ import annotations

from typing import Any

from pipecompile.torch_private.structured_trace import add_artifact

__all__ = ["trace_phase"]

_ARTIFACTS = {"prepare": "graph", "partition": "plan", "lower": "program"}


def trace_phase(phase: str, result: Any) -> None:
    """Add the result of a phase as an artifact, if it is a level."""
    if (level := _ARTIFACTS.get(phase)) is not None:
        plan = getattr(result, "plan", None)
        add_artifact(f"pipecompile_{level}", lambda: str(result) if plan is None else str(plan.to_json()))
