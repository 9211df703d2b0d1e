"""Numbers of micro-batches for `n_microbatches="auto"`: the numbers to compare, and those that a recording cannot serve."""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.errors import InputError
from pipecompile.graph.cross_sample import check_batch_first
from pipecompile.text.units import counted
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["barred", "counts_to_try", "first_count"]

_PER_DEVICE = 4
"""Micro-batches per device up to which numbers are compared: beyond, the bubble is small."""


def counts_to_try(samples: int, n_devices: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches to compare: 1, 2, 3, 4, 6, 8, 12, 16 ..., at most one per sample."""
    most = min(samples, _PER_DEVICE * n_devices)
    powers = [2**power for power in range(most.bit_length())]
    return tuple(sorted(n for n in (*powers, *(3 * power for power in powers)) if n <= most))


def first_count(samples: int, default: int) -> int:
    """Return the number of micro-batches to record for: near the default, all of one size of at least two samples."""
    alike = (n for n in range(min(default, samples), 0, -1) if samples % n == 0 and samples // n > 1)
    return next(alike, 1)


def barred(graph: TracedGraph, parts: Sequence[int]) -> str:
    """Return why a recording cannot serve micro-batches of these sizes, in samples. Return "" if it can."""
    guards = graph.facts.guards
    guard = next((guard for guard in guards for size in set(parts) if not guard.holds(size)), None)
    if guard is not None:
        return f"the model branches on the batch size: {guard}"
    only = graph.facts.batch_size
    if only is not None and set(parts) != {only}:
        return f"the recording is for micro-batches of {counted(only, 'sample')} alone"
    try:
        check_batch_first(graph) if len(parts) > 1 else None
    except InputError as error:
        return error.what
    return ""
