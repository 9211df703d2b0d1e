"""Layouts of inputs: what Python reads of them is guarded, and copies keep them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.input_layouts import copy_of, layout_of, strides_of

LAID_OUT = {
    "transposed": torch.randn(4, 4).T,
    "expanded": torch.randn(1, 4).expand(4, 4),
    "every second row": torch.randn(8, 4)[::2],
    "some columns": torch.randn(4, 9)[:, 2:6],
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_copies_keep_the_layout(name: str) -> None:
    tensor = LAID_OUT[name]
    copied, layout = copy_of(tensor), layout_of(tensor)
    assert torch.equal(copied, tensor)
    assert layout is not None
    assert layout_of(copied) == layout
    assert layout_of(torch.empty_strided(tensor.shape, strides_of(layout, tensor.shape))) == layout
    assert copied.data_ptr() != tensor.data_ptr()


class AsksLayout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x))
        return y if x.is_contiguous() else 2 * y if x.stride(0) else 3 * y


def test_a_model_that_asks_for_layouts_is_recorded_anew_for_another_one() -> None:
    """The recording of the first layout was used for all, silently."""
    model = AsksLayout()
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, loss_fn=torch.sum, cost="analytic")
    for x in [torch.randn(4, 4), *LAID_OUT.values()][:5]:
        expected = torch.cat([eager(part) for part in x.chunk(2)])
        assert torch.equal(pipe(x), expected)
    assert pipe.explain().traces == 4  # rows apart and columns apart are both gaps, but not in the same dimension


def test_a_model_that_does_not_ask_serves_all_layouts() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, loss_fn=torch.sum, cost="analytic")
    for x in [torch.randn(4, 4), *LAID_OUT.values()][:5]:
        pipe(x)
    assert pipe.explain().traces == 1


class AsksInference(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return 3 * y if torch.is_inference_mode_enabled() else y


def test_a_model_that_asks_for_inference_mode_is_refused_in_it() -> None:
    """The recording outside of inference mode was used inside, silently."""
    model = AsksInference(nn.Linear(4, 8), nn.Linear(8, 4)).eval()
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, cost="analytic")
    x = torch.randn(4, 4)
    with torch.no_grad():
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
    with torch.inference_mode(), pytest.raises(pc.InputError, match="asks whether inference mode is on") as told:
        pipe(x)
    assert "AsksInference.forward" in str(told.value)
