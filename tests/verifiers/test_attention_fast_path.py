"""The fast path of attention, which does not call the layers that were put in the place of others."""

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import MismatchError
from pipecompile.verifiers.attention_fast_path import may_take_fast_path, slow_path

X = torch.linspace(-1, 1, 160).reshape(4, 5, 8)


class Adapted(nn.Module):
    """A linear layer with an adapter, which shows the weights of the layer as its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(base.in_features, base.out_features, bias=False)
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def adapted_encoder() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.linear1 = Adapted(layer.linear1)
    return nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 2)).eval()


def test_the_error_names_the_fast_path_and_its_try_makes_pipeline_and_model_equal() -> None:
    model = adapted_encoder()
    pipe = pc.compile(model, 2, n_microbatches=2, cost="analytic", devices=["cpu"] * 2)

    with torch.no_grad(), pytest.raises(MismatchError, match=r"(?s)fast path.*set_fastpath_enabled\(False\)"):
        pipe(X)
    with torch.no_grad(), slow_path():
        torch.testing.assert_close(pipe(X), model(X))
    assert torch.backends.mha.get_fastpath_enabled()


def test_only_attention_in_evaluation_without_gradients_may_take_the_fast_path() -> None:
    model = adapted_encoder()

    assert may_take_fast_path(model, with_grad=False)
    assert not may_take_fast_path(model, with_grad=True)
    assert not may_take_fast_path(nn.Linear(2, 2).eval(), with_grad=False)
    assert not may_take_fast_path(model.train(), with_grad=False)
    with slow_path():
        assert not may_take_fast_path(model.eval(), with_grad=False)
