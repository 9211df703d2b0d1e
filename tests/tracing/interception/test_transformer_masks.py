"""Masks of nn.Transformer while it is recorded."""

import warnings

import pytest
import torch
from torch import nn

import pipecompile as pc


class Padded(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, **options), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.parametrize(("nests", "grad", "warns"), [(True, False, True), (False, False, False), (True, True, False)])
def test_an_encoder_that_leaves_zeros_at_padding_in_eager_is_warned_of(nests: bool, grad: bool, warns: bool) -> None:
    torch.manual_seed(0)
    model, x = Padded(enable_nested_tensor=nests).eval(), torch.randn(4, 5, 8)
    padding = torch.tensor([5, 5, 5, 2])[:, None] <= torch.arange(5)  # none in the first micro-batch
    pipe = pc.compile(model, 2, example_args=(x, padding), n_microbatches=2, cost="analytic", devices=["cpu"] * 2)

    with torch.set_grad_enabled(grad), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made, expected = pipe(x, padding), model(x, padding)

    assert any("enable_nested_tensor=False" in str(one.message) for one in caught) == warns
    torch.testing.assert_close(made[~padding], expected[~padding])
    if not warns:
        torch.testing.assert_close(made, expected)
