"""The hint of an InfeasibleError: the least number of stages that fits, where more stages can be had."""

from __future__ import annotations

from typing import Any

import pytest

import pipecompile as pc
from pipecompile.options import Options
from pipecompile.partitioners.problem import Node
from pipecompile.planning.infeasible_hint import TRIES, with_enough_stages
from tests.support.compilations import layers, options_of

ERROR = pc.InfeasibleError("no cut fits", where="stage 0", why="too large", hint="memory_limit=80")
NAMES = "abcdefgh"


def problem_of(options: Options, size: float = 20.0) -> pc.Problem:
    """Return a chain of 8 nodes of `size` bytes each."""
    nodes = tuple(Node(name, 1.0, size) for name in NAMES)
    return pc.Problem(nodes, tuple(zip(NAMES, NAMES[1:], strict=False)), memory_limit=options.memory_limit)


def test_the_least_number_of_stages_that_fits_is_added_and_the_rest_stays() -> None:
    error = with_enough_stages(ERROR, problem_of, options_of(memory_limit=40.0))
    assert error.hint == "memory_limit=80, or n_stages=4"
    assert (error.what, error.where, error.why) == ("no cut fits", "stage 0", "too large")


def test_the_problem_is_built_for_each_number_of_stages() -> None:
    tried: list[tuple[int, int, Any]] = []

    def problem(options: Options) -> pc.Problem:
        tried.append((options.n_stages, len(options.devices), options.checkpoint))
        return problem_of(options)

    with_enough_stages(ERROR, problem, options_of(memory_limit=60.0, checkpoint=[True, False]))
    assert tried == [(3, 3, "never")]  # flags are for two stages
    tried.clear()
    with_enough_stages(ERROR, problem, options_of(memory_limit=60.0, checkpoint="always"))
    assert tried == [(3, 3, "always")]


def test_a_node_that_fits_nowhere_leaves_the_error_as_it_is() -> None:
    tried = []

    def problem(options: Options) -> pc.Problem:
        tried.append(options.n_stages)
        return problem_of(options)

    assert with_enough_stages(ERROR, problem, options_of(memory_limit=10.0)) is ERROR
    assert tried == [*range(3, 3 + TRIES)]


@pytest.mark.parametrize(
    "keywords",
    [
        {"memory_limit": [40.0, 40.0]},
        {"memory_limit": 40.0, "speeds": [1, 2]},
        {"memory_limit": 40.0, "bandwidth": [[0, 1e9], [1e9, 0]]},
        {"memory_limit": 40.0, "pin": {"0": 0}},
        {"memory_limit": 40.0, "schedule": pc.build_schedule("gpipe", 2, 2)},
        {"memory_limit": 40.0, "devices": ["cpu"], "schedule": "interleaved"},
    ],
    ids=str,
)
def test_where_further_stages_are_not_alike_nothing_is_tried(keywords: dict[str, Any]) -> None:
    options = options_of(layers(), **keywords)
    assert with_enough_stages(ERROR, problem_of, options) is ERROR


def test_a_hint_with_a_number_of_stages_is_kept() -> None:
    error = pc.InfeasibleError("no cut fits", hint="n_stages=3 or fewer")
    assert with_enough_stages(error, problem_of, options_of(memory_limit=40.0)) is error
