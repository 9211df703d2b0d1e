"""The choice among schedules of equal time: least memory, then fewest messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from pipecompile.schedules.search.evaluate import MemoryLimit
from pipecompile.schedules.search.list_search import EvaluatedSchedule
from pipecompile.simulation.from_schedule import device_transfers

__all__ = ["lightest"]

_NEGLIGIBLE = 1e-9
"""Relative tolerance for comparing seconds."""


def lightest(candidates: Sequence[EvaluatedSchedule]) -> EvaluatedSchedule:
    """Return the fastest schedule; of equally fast ones that with the least memory, then that with the fewest messages."""
    least = min(candidate.seconds for candidate in candidates)
    fastest = [candidate for candidate in candidates if candidate.seconds <= least * (1 + _NEGLIGIBLE)]
    return fastest[0] if len(fastest) == 1 else min(fastest, key=_load)


def _load(candidate: EvaluatedSchedule) -> tuple[float, float, int]:
    """Return the largest peak of a device and the sum of all, in bytes or micro-batches in flight, and the number of messages."""
    evaluator = candidate.evaluator
    unlimited = MemoryLimit((inf,) * candidate.schedule.n_devices, in_bytes=any(evaluator.costs.saved))
    peaks = replace(evaluator, limit=unlimited).peaks(candidate.schedule)
    return max(peaks), sum(peaks), sum(1 for _ in device_transfers(evaluator.routes, evaluator.placement))
