"""A capture computes with aliases of the weights, and holds no node at which their gradients are added."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.graph.backward_split import explore_backward
from pipecompile.runtime.cuda_graphs.replay import CapturedStage
from pipecompile.runtime.cuda_graphs.weight_aliases import WeightAliases
from pipecompile.torch_private import pytree
from tests.support.emulated_capture import EmulatedCaptures


def captured(layer: nn.Linear, aliases: WeightAliases | None) -> CapturedStage:
    leaves, spec = pytree.tree_flatten((torch.zeros(2, 4),))
    return CapturedStage(lambda x: (layer(x),), EmulatedCaptures()(), leaves, spec, pytest.fail, aliases)


@pytest.mark.parametrize("is_aliased", [True, False])
def test_gradients_are_added_at_nodes_of_the_step(is_aliased: bool) -> None:
    """Without aliases, as before, the nodes of every step are those of the capture, which belong to its stream."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    stage = captured(layer, WeightAliases(layer) if is_aliased else None)
    held, _ = explore_backward([edge for edge in stage.edges if edge is not None], frozenset())
    output = stage.run([x])[0]
    used = {node for node, _ in output.grad_fn.next_functions if node is not None and "AccumulateGrad" in node.name()}
    assert len(used) == 2
    assert used.isdisjoint(held) == is_aliased
    output.sum().backward()
    assert [p.grad for p in layer.parameters()] != [None, None]


def test_the_weights_are_back_and_get_their_own_gradients() -> None:
    layer, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    before = list(layer.parameters())
    stage = captured(layer, WeightAliases(layer))
    assert all(a is b for a, b in zip(layer.parameters(), before, strict=True))
    for _ in range(3):
        x = torch.randn(2, 4)
        stage.run([x])[0].square().sum().backward()
        plain(x).square().sum().backward()
        for mine, other in zip(layer.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
            mine.data.add_(other.grad, alpha=-0.1)  # type: ignore[arg-type]
            other.data.add_(other.grad, alpha=-0.1)  # type: ignore[arg-type]


def test_a_weight_of_several_stages_has_no_alias() -> None:
    layer = nn.Linear(4, 4)
    aliases = WeightAliases(layer, frozenset([id(layer.weight)]))
    with aliases.in_place():
        assert aliases.weight_of(layer.bias) is not layer.bias
        assert aliases.weight_of(layer.weight) is layer.weight
