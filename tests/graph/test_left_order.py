"""Stages that leave values and send nothing: every backward comes behind their forward of the micro-batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, assert_same
from tests.support.slow_numbers import slow_number

M = 4


class HookReads(nn.Module):
    """A hook on a gradient reads what a piece kept whole leaves. Nothing leads from the piece to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        self.scale = slow_number(x.detach()[0, 0].abs())
        h = self.first(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * self.scale)
        return self.last(h.sin())


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "dualpipe"])
def test_a_backward_in_a_thread_waits_for_what_it_reads(schedule: str) -> None:
    torch.manual_seed(0)
    model = HookReads().double()
    other = copy.deepcopy(model)
    x, target = torch.randn(2 * M, 6, dtype=torch.float64), torch.randint(6, (2 * M,))
    pipe = pc.compile(
        model, 4, example_args=(x,), n_microbatches=M, loss_fn=F.cross_entropy, schedule=schedule, cost="analytic",
        dispatch="threads",
    )  # fmt: skip
    alone = [stage.index for stage in pipe.stages if any("kept" in name for name in stage.nodes)]
    routes = [route for route in pipe.program.routes if route.source in alone]
    assert [(route.consumers, route.gradient, route.nbytes) for route in routes] == [((3,), False, 0.0)]
    for _ in range(2):
        pipe.step(x, target=target)
        accumulate(other, x, M, F.cross_entropy, target)
        assert_same(model, other, 1e-12)
