"""A recomputation draws what its forward drew, in threads, too."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from tests.support.checkpointed import built, compiled
from tests.support.eager import accumulate, assert_same

REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


class Dropping(nn.Module):
    """Its loss is linear in `weight`: loss = weight * gradient, if the recomputation draws the mask of the forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.weight, self.reentrant = nn.Parameter(torch.ones(())), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def region(h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return dropout(dropout(h.sin(), 0.5).cos() * scale, 0.5)

        for _ in range(4):
            x = checkpoint(region, x * self.weight, torch.ones_like(x), use_reentrant=self.reentrant)
        return x


@REENTRANT
def test_a_recomputation_draws_the_numbers_of_its_forward(reentrant):
    model, eager = built(lambda: Dropping(reentrant))
    x = torch.randn(8, 64)
    pipe = compiled(model, x, 2)
    for run in (lambda: pipe.step(x), lambda: accumulate(eager, x, 1)):
        torch.manual_seed(5)
        loss = run()
        after = torch.rand(())
    assert_same(model, eager)
    torch.manual_seed(5)
    assert torch.equal(pipe.step(x), loss)
    assert torch.equal(torch.rand(()), after), "the generator is where eager leaves it"


class Masked(nn.Module):
    """loss = weight * its gradient, whatever the masks, as long as each recomputation has those of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = checkpoint(lambda h, w=weight: dropout(dropout(h, 0.3), 0.3) * w, x, use_reentrant=False)
        return x


def test_threads_do_not_draw_into_each_others_recomputations():
    model, _ = built(Masked)
    x = torch.rand(64, 512)
    pipe = compiled(
        model, x, 2, n_microbatches=16, schedule="1f1b", dispatch="threads", loss_fn=torch.mean, check=False
    )
    for _ in range(3):
        model.zero_grad()
        loss = pipe.step(x)
        for weight in model.weights:
            torch.testing.assert_close(weight.grad, loss, rtol=1e-4, atol=0)


class Layers(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()) for _ in range(4))
        self.first, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@REENTRANT
@pytest.mark.parametrize("checkpoint_stages", ["never", "always"])
def test_draws_of_several_microbatches_are_those_of_the_plain_loop(reentrant, checkpoint_stages):
    model, eager = built(lambda: Layers(reentrant))
    x = torch.randn(8, 4)
    pipe = compiled(model, x, 3, n_microbatches=4, dispatch="inline", checkpoint=checkpoint_stages)
    for run in (lambda: pipe.step(x), lambda: accumulate(eager, x, 4)):
        torch.manual_seed(5)
        run()
    assert_same(model, eager)
