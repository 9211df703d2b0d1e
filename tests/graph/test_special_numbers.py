"""Special numbers are those that calls mention, and each that a call admits is drawn in a trial that runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.special_numbers import SpecialTrials, ignored_classes, special_numbers
from pipecompile.tracing.traced_graph import TracedGraph

Function = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.CrossEntropyLoss(ignore_index=2) if function is layered else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) if self.layer is None else self.layer(x, x.argmax(1))


def layered(x: torch.Tensor) -> torch.Tensor:
    return x


def graph_of(function: Function) -> TracedGraph:
    return pc.trace(Model(function), torch.randn(4, 3))


def ignoring(index: int) -> Function:
    return lambda x: F.cross_entropy(x.clamp(max=7.5), x.argmax(1), ignore_index=index)


@pytest.mark.parametrize(
    ("function", "classes"),
    [
        (ignoring(-7), {-7}),
        (lambda x: F.nll_loss(x, x.argmax(1)), {-100}),
        (lambda x: F.nll_loss(x, x.argmax(1), None, None, 1), {1}),
        (layered, {2}),
        (lambda x: x.relu(), set()),
    ],
)
def test_the_class_that_a_loss_ignores(function: Function, classes: set[int]) -> None:
    graph = graph_of(function)
    assert ignored_classes(compute_nodes(graph), graph) == classes


@pytest.mark.parametrize(
    ("function", "present", "absent"),
    [
        (ignoring(-7), {7.5, -7}, {-100}),
        (lambda x: x.clamp(max=7.5), {7.5, -100}, set()),
        (lambda x: x * 1e9, {-100}, {1e9}),
    ],
)
def test_numbers_of_the_calls_are_special(function: Function, present: set[float], absent: set[float]) -> None:
    graph = graph_of(function)
    numbers = set(special_numbers(compute_nodes(graph), graph))
    assert present <= numbers
    assert not absent & numbers


@pytest.mark.parametrize(
    ("function", "has_nan"), [(lambda x: x.nanmean(0), True), (lambda x: x.isfinite(), True), (torch.relu, False)]
)
def test_nan_is_special_where_a_call_tells_it_from_numbers(function: Function, has_nan: bool) -> None:
    graph = graph_of(function)
    assert any(map(math.isnan, special_numbers(compute_nodes(graph), graph))) is has_nan


def trials_of(admitted: set[float], count: int) -> tuple[SpecialTrials, list[list[float]]]:
    """Return the trials of a loss that ignores -7 and fails on all but `admitted`, and the numbers of the calls that were made."""
    graph, calls = graph_of(ignoring(-7)), []

    def attempt(numbers: Sequence[float]) -> Any:
        calls.append(list(numbers))
        return "result" if set(numbers) <= admitted else None

    trials = SpecialTrials(compute_nodes(graph), graph)
    for trial in range(count):
        list(trials.results(trial, attempt))
    return trials, calls


def test_a_number_that_fails_is_left_out_of_the_next_trial_of_its_kind() -> None:
    trials, calls = trials_of({-7}, 5)
    assert trials.is_complete
    assert [-7] in calls
    assert calls[-1] == [-7]


def test_trials_in_which_the_ignored_class_always_fails_are_not_complete() -> None:
    assert not trials_of({7.5}, 8)[0].is_complete
    assert not trials_of({-7, 7.5}, 0)[0].is_complete
