"""The division of a backward into gradients of inputs and of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pipecompile.graph.backward_split import INPUT, BackwardDivision, divide_backward, explore_backward


def division(
    run: Callable[[torch.Tensor], torch.Tensor], *, inputs: bool = True, least: float = 0.0
) -> tuple[list[str], BackwardDivision]:
    x = torch.randn(2, 4, requires_grad=inputs)
    leaves = frozenset({id(x)}) if inputs else frozenset()
    nodes, structure = explore_backward([get_gradient_edge(run(x))], leaves)
    return list(structure[0]), divide_backward(nodes, structure, least)


def test_each_linear_layer_is_a_fork() -> None:
    names, divided = division(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert [names[fork] for fork, _ in divided.forks] == ["AddmmBackward0"] * 2
    assert [len(weights) for _, weights in divided.forks] == [2, 2]
    assert (divided.outer, divided.early) == ((), ())
    assert not divided.is_whole
    assert "ReluBackward0" in [names[node] for node in divided.spent]


def test_a_small_weight_is_early() -> None:
    _, divided = division(nn.Linear(4, 4), least=1e9)
    assert divided.is_whole
    assert len(divided.early) == 2


def test_without_inputs_everything_is_left_to_w() -> None:
    names, divided = division(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), inputs=False)
    assert INPUT not in names
    assert (divided.forks, divided.outer, divided.early) == ((), (0,), ())


def test_a_norm_computes_all_gradients_at_once() -> None:
    _, divided = division(nn.LayerNorm(4))
    assert divided.is_whole
    assert len(divided.early) == 2


def test_a_weight_that_is_used_twice_is_early() -> None:
    layer = nn.Linear(4, 4)
    _, divided = division(lambda x: layer(layer(x).relu()))
    assert divided.is_whole
    assert len(divided.early) == 2


@pytest.mark.parametrize(("ours", "is_whole"), [(False, True), (True, False)])
def test_packed_tensors_are_early_unless_the_hooks_are_ours(ours: bool, is_whole: bool) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        out = layer(x)
    nodes, structure = explore_backward([get_gradient_edge(out)], frozenset({id(x)}))
    assert divide_backward(nodes, structure, 0.0, ours=ours).is_whole is is_whole


def test_the_structure_has_roots_first_and_no_node_as_minus_one() -> None:
    x = torch.randn(2, requires_grad=True)
    nodes, (names, rows, count) = explore_backward([get_gradient_edge(x * 2.0)], frozenset({id(x)}))
    assert (names, rows, count) == (("MulBackward0", INPUT), ((1, -1), ()), 1)
    assert len(nodes) == 2
