"""Calls of torch.utils.checkpoint are recorded through, with a region for their nodes."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint_sequential

from tests.support.checkpointed import built, compiled
from tests.support.eager import accumulate, assert_same

REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


@pytest.mark.parametrize("implementation", CheckpointImpl)
def test_wrapped_modules_are_regions(implementation):
    def make() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(3)]
        wrapped = [checkpoint_wrapper(layer, checkpoint_impl=implementation) for layer in layers]
        return nn.Sequential(nn.Linear(4, 4), *wrapped)

    model, eager = built(make)
    x = torch.randn(6, 4)
    compiled(model, x, 2).step(x)
    accumulate(eager, x, 1)
    assert_same(model, eager)


@REENTRANT
def test_a_reentrant_region_whose_inputs_need_no_gradient_trains_nothing_as_in_eager(reentrant):
    """Its weights got gradients, which eager does not give them."""

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.last = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint_sequential(self.layers, 2, x, use_reentrant=reentrant))

    model, eager = built(Segments)
    x = torch.randn(6, 4)
    if reentrant:
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
            pipe = compiled(model, x, 2)
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
            accumulate(eager, x, 1)
        pipe.step(x)
        assert model.layers[0].weight.grad is None
    else:
        compiled(model, x, 2).step(x)
        accumulate(eager, x, 1)
    assert_same(model, eager)
