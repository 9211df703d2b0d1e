"""A finished recording: outputs as the model has them, and inputs that are those it was made for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc


class Summing(nn.Module):
    def forward(self, parts: list[torch.Tensor], scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"sum": sum(parts) * scale, "first": parts[0]}


def test_outputs_keep_their_structure_and_inputs_come_out_as_they_are() -> None:
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    made = pc.trace(Summing(), [x, x])([x, y])
    assert list(made) == ["sum", "first"]
    assert torch.equal(made["sum"], x + y)
    assert torch.equal(made["first"], x)


@pytest.mark.parametrize("given", [1, 3])
def test_a_list_of_another_length_is_refused(given: int) -> None:
    graph = pc.trace(Summing(), [torch.randn(4, 2)] * 2)
    with pytest.raises(pc.InputError, match="recorded with 2 values in its inputs"):
        graph([torch.randn(4, 2)] * given)
    pipe = pc.compile(Summing(), 1, n_microbatches=2, cost="analytic")
    for count in (2, given):
        parts = [torch.randn(4, 2) for _ in range(count)]
        assert torch.equal(pipe(parts)["sum"], sum(parts))
