"""Cuts between a value and an operation that writes into it: a copy at the cut, equal to eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, assert_same, square_loss


class Stream(nn.Module):
    """Every layer adds to one tensor in place, as many residual networks do; no layer saves the tensor itself."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for layer in self.layers:
            h += layer(h.relu())
        return self.last(h)


class Writer(nn.Module):
    """Writes rows of a tensor that a layer before has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.read, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        before = self.read(h.relu())
        h[:, 0] = 0
        return self.last(h) + before.sum(1, keepdim=True)


CASES = {
    "relu": (lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(inplace=True)), 2, {"split_before": ["1"]}),
    "stream": (Stream, 3, {}),
    "setitem": (Writer, 2, {"split_before": ["last"], "pin": {"first": 0}}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("name", CASES)
def test_a_copy_at_the_cut_is_equal_to_eager(name: str, schedule: str, dispatch: str) -> None:
    make, n_stages, forced = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, 8)
    reference = copy.deepcopy(model)
    checkpoint = "always" if schedule == "gpipe" else "never"
    pipe = pc.compile(
        model, n_stages, example_args=(x,), n_microbatches=4, schedule=schedule, loss_fn=square_loss, cost="analytic",
        devices=["cpu"] * n_stages, dispatch=dispatch, checkpoint=checkpoint, bandwidth=1e15, **forced,
    )  # fmt: skip
    assert len(set(pipe.plan.stage_of.values())) == n_stages
    for _ in range(2):
        assert pipe.step(x) == pytest.approx(accumulate(reference, x, 4).item(), rel=1e-6)
    assert_same(model, reference)
    assert torch.equal(pipe(x), torch.cat([reference(part) for part in x.split(2)]))


def test_a_stream_is_cut_evenly_and_in_evaluation_alike() -> None:
    torch.manual_seed(0)
    model, x = Stream(11), torch.randn(8, 8)
    pipe = pc.compile(
        model, 4, example_args=(x,), n_microbatches=2, devices=["cpu"] * 4, cost="analytic", loss_fn=square_loss,
        bandwidth=1e15,
    )  # fmt: skip
    loads = [stage.forward + stage.backward for stage in pipe.plan.stages]
    assert max(loads) < 1.4 * sum(loads) / 4
    assert pc.Plan.from_json(pipe.plan.to_json()) == pipe.plan
    again = pc.compile(copy.deepcopy(model), 4, example_args=(x,), n_microbatches=2, devices=["cpu"] * 4,
                       cost="analytic", loss_fn=square_loss, plan=pipe.plan)  # fmt: skip
    assert again.plan.stage_of == pipe.plan.stage_of
    model.eval()
    pipe.eval()
    assert torch.equal(pipe(x), torch.cat([model(part) for part in x.split(4)]))
