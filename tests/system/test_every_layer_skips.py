"""Models whose every block reads the outputs of all earlier blocks train under any schedule; each value crosses once per device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.ir import Op
from tests.support.eager import accumulate, assert_same, square_loss


class Block(nn.Module):
    """Attention over the terms of the residual stream, by a query of its own, then a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.layer = nn.Parameter(torch.randn(width)), nn.Linear(width, width)

    def forward(self, terms: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(terms)
        weights = (stacked * self.query).sum(-1).softmax(0)
        return self.layer((weights.unsqueeze(-1) * stacked).sum(0)).tanh()


class AttentionResiduals(nn.Module):
    def __init__(self, n_blocks: int = 8, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = [x * 1.0]
        for block in self.blocks:
            terms.append(block(terms))
        return terms[-1]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_attention_residuals_train_and_each_value_crosses_once_per_device(schedule: str, chunks: int) -> None:
    torch.manual_seed(0)
    model, x = AttentionResiduals(), torch.randn(12, 8)
    reference, n_stages = copy.deepcopy(model), 4 * chunks
    per_stage = 8 // n_stages
    pins = {f"blocks.{i}": i // per_stage for i in range(8)}
    pipe = pc.compile(
        model, n_stages, example_args=(x,), n_microbatches=6, schedule=schedule, loss_fn=square_loss, cost="analytic",
        devices=["cpu"] * 4, pin=pins,
    )  # fmt: skip
    for _ in range(2):
        assert pipe.step(x) == pytest.approx(accumulate(reference, x, 6).item(), rel=1e-6)
    assert_same(model, reference, tolerance=1e-5)
    placement, routes = pipe.plan.placement, pipe.plan.routes
    crossing = {(r.value, placement[end]) for r in routes if r.source >= 0 for end in r.consumers if end >= 0}
    crossing -= {(r.value, placement[r.source]) for r in routes if r.source >= 0}
    sent = [i for row in pipe.program.rows for i in row if i.op is Op.SEND and i.peer is not None and i.peer >= 0]
    values = [one for one in sent if one.reads[0].value.consumer is None and one.reads[0].value.microbatch == 0]
    assert len(values) == len(crossing)
