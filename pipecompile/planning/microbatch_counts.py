"""In how many micro-batches a mini-batch may go: the numbers that are tried, and those that a recording does not serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pipecompile.costs.node_cost import CostError
from pipecompile.errors import InputError
from pipecompile.graph.cross_sample import check_sequences
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["barred", "counts_to_try", "first_count", "too_small"]

_PER_DEVICE = 4
"""As many micro-batches are tried as this times the devices: the bubble is small then."""


def counts_to_try(samples: int, n_devices: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16 ...: steps of a half and of a third, as far as there are samples."""
    most = min(samples, _PER_DEVICE * n_devices)
    powers = [2**power for power in range(most.bit_length())]
    return tuple(sorted(n for n in (*powers, *(3 * power for power in powers)) if n <= most))


def first_count(samples: int, default: int) -> int:
    """In how many micro-batches the model is recorded: about as many as by default, all alike, of more than one sample."""
    alike = (n for n in range(min(default, samples), 0, -1) if samples % n == 0 and samples // n > 1)
    return next(alike, 1)


def barred(graph: TracedGraph, parts: Sequence[int]) -> str:
    """Why a recording does not serve micro-batches of these sizes; empty when it does."""
    guards = graph.facts.guards
    guard = next((guard for guard in guards for size in set(parts) if not guard.holds(size)), None)
    if guard is not None:
        return f"the model branches on the batch size: {guard}"
    only = graph.facts.batch_size
    if only is not None and set(parts) != {only}:
        return f"the recording is for micro-batches of {only} samples alone"
    try:
        check_sequences(graph) if len(parts) > 1 else None
    except InputError as error:
        return error.what
    return ""


@contextmanager
def too_small(count: int, samples: int | None) -> Iterator[None]:
    """Give a CostError the hint that micro-batches of so many samples may be too small, when there are several."""
    try:
        yield
    except CostError as error:
        if count == 1:
            raise
        hint = f"n_microbatches=, fewer than {count}, if a micro-batch of {samples} is too small for the model"
        raise CostError(error.what, where=error.where, why=error.why, hint=hint) from error.__cause__
