"""The dimension of positions, from recordings of two lengths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.graph.sequence_axes import Axis, SequenceAxes, UnclearAxisError


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def axes_of(function: Callable[[Tensor], Tensor]) -> tuple[SequenceAxes, list[torch.fx.Node]]:
    part, whole = (pc.trace(Function(function), torch.randn(3, length, 4)) for length in (5, 20))
    axes = SequenceAxes(part, whole, 4, 5)
    x, *nodes = [node for node in part.graph.nodes if node.op != "output" and isinstance(node.meta["val"], Tensor)]
    axes.axes[x] = [Axis(1)]
    return axes, [x, *nodes]


@pytest.mark.parametrize(
    ("function", "dim"),
    [(lambda x: x.transpose(1, 2), 2), (lambda x: x[0, 0], None), (lambda x: x.unsqueeze(0), 2)],
)  # fmt: skip
def test_the_dimension_that_grows(function: Callable[[Tensor], Tensor], dim: int | None) -> None:
    axes, nodes = axes_of(function)
    assert axes.dims(nodes[-1]) == [dim]


@pytest.mark.parametrize(
    "function", [lambda x: x @ x.transpose(1, 2), lambda x: x[:, 1:], lambda x: x[:, : x.shape[1] // 2]]
)
def test_other_shapes_are_unclear(function: Callable[[Tensor], Tensor]) -> None:
    axes, nodes = axes_of(function)
    with pytest.raises(UnclearAxisError):
        axes.dims(nodes[-1])


def test_a_reshape_keeps_what_follows_a_position() -> None:
    axes, (x, flat) = axes_of(lambda x: x.flatten(0, 1))
    assert axes.reshaped(x, flat) == Axis(0)
    axes, (x, flat) = axes_of(lambda x: x.flatten(1))
    assert axes.reshaped(x, flat) == Axis(1, 4)
    axes, (x, moved) = axes_of(lambda x: x.reshape(x.shape[1], x.shape[0], 4))
    with pytest.raises(UnclearAxisError):
        axes.reshaped(x, moved)
    assert (axes.rank(x), axes.size(x, 1)) == (3, 5)
