"""The cost of a node: W has half of a backward of which nothing else is known."""

from __future__ import annotations

import pytest

from pipecompile.costs import CostError, NodeCost
from pipecompile.errors import PipecompileError


@pytest.mark.parametrize(("weight", "expected"), [(None, 1.5), (0.0, 0.0), (2.0, 2.0)])
def test_w_has_its_known_part_of_the_backward_or_half(weight: float | None, expected: float) -> None:
    assert NodeCost(1.0, 3.0, 0, 0, weight=weight).weight_grad == expected


def test_an_error_of_a_cost_is_an_error_of_the_library() -> None:
    assert issubclass(CostError, PipecompileError)
    assert "\n" not in repr(NodeCost(1.0, 3.0, 8, 16))
