"""The models of the published benchmarks have the published numbers of parameters, and are recorded as they are written."""

from __future__ import annotations

import pytest
import torch
from published_models import AmoebaNetD, UNet
from torch import nn

import pipecompile as pc


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("build", "blocks", "width", "millions"),
    [
        (UNet, 6, 72, 362.2), (UNet, 11, 128, 2210), (UNet, 24, 128, 4990), (UNet, 24, 160, 7800), (UNet, 48, 160, 15820),
        (AmoebaNetD, 18, 208, 81.5), (AmoebaNetD, 18, 416, 319.0), (AmoebaNetD, 18, 544, 542.7),
        (AmoebaNetD, 36, 544, 1060), (AmoebaNetD, 72, 512, 1840),
    ],
)  # fmt: skip
def test_the_numbers_of_parameters_are_those_published(
    build: type[nn.Module], blocks: int, width: int, millions: float
) -> None:
    with torch.device("meta"):
        model = build(blocks, width)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=4e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", [UNet(2, 4), AmoebaNetD(3, 16, 10)])
def test_a_step_in_stages_is_that_of_eager(model: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = model.double().eval(), torch.randn(4, 3, 64, 64, dtype=torch.double)
    pipe = pc.compile(model, 4, example_args=(x,), n_microbatches=2, loss_fn=torch.Tensor.sum, loss_reduction="sum")
    for part in x.chunk(2):
        model(part).sum().backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    pipe.step(x)
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        assert p.grad is not None
        assert gradient is not None
        torch.testing.assert_close(p.grad, gradient, rtol=1e-9, atol=1e-12)
