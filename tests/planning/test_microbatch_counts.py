"""Numbers of micro-batches: those to compare, the one to record, and those that a recording cannot serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import nn

import pipecompile as pc
from pipecompile.planning.microbatch_counts import barred, counts_to_try, first_count
from pipecompile.tracing.fakes.batch_symbol import Guard

SIZE = sympy.Symbol("s", integer=True, positive=True)


def recording(*guards: Guard, batch_size: int | None = None) -> Any:
    """Return the facts of a recording without a graph."""
    return SimpleNamespace(
        facts=SimpleNamespace(guards=guards, batch_size=batch_size), graph=SimpleNamespace(nodes=()), nodes=()
    )


@pytest.mark.parametrize(
    ("samples", "n_devices", "counts"),
    [
        (1, 4, (1,)),
        (5, 4, (1, 2, 3, 4)),
        (16, 4, (1, 2, 3, 4, 6, 8, 12, 16)),
        (1000, 2, (1, 2, 3, 4, 6, 8)),
        (1000, 1, (1, 2, 3, 4)),
    ],
)
def test_numbers_to_compare_are_powers_of_two_and_half_as_much_again(
    samples: int, n_devices: int, counts: tuple[int, ...]
) -> None:
    assert counts_to_try(samples, n_devices) == counts


@pytest.mark.parametrize(
    ("samples", "default", "count"), [(16, 8, 8), (8, 8, 4), (10, 8, 5), (7, 8, 1), (1, 8, 1), (12, 5, 4), (6, 3, 3)]
)
def test_the_recorded_micro_batches_are_equal_and_of_two_samples_at_least(
    samples: int, default: int, count: int
) -> None:
    assert first_count(samples, default) == count


def test_a_guard_bars_sizes_on_its_other_side() -> None:
    graph = recording(Guard(SIZE, SIZE > 1), Guard(SIZE, SIZE < 5))
    assert barred(graph, (4, 4, 3)) == ""
    assert barred(graph, (2, 1)) == "the model branches on the batch size: batch_size > 1"
    assert barred(graph, (6, 6)) == "the model branches on the batch size: batch_size < 5"


def test_a_recording_for_one_size_serves_no_other() -> None:
    graph = recording(batch_size=3)
    assert barred(graph, (3, 3)) == ""
    assert barred(graph, (3, 2)) == "the recording is for micro-batches of 3 samples alone"


def test_layers_that_take_the_batch_for_time_bar_several_micro_batches() -> None:
    graph = pc.trace(nn.Sequential(nn.GRU(4, 4)), torch.zeros(6, 2, 4))
    assert barred(graph, (6,)) == ""
    assert "takes the batch for time" in barred(graph, (3, 3))
