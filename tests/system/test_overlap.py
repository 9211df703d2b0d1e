"""Schedules whose forwards and backwards overlap train as those without: the same order, the same sums, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from models import UNet
from torch import nn

import pipecompile as pc


def gradients(model: nn.Module, schedule: pc.Schedule | pc.Program, dispatch: str = "inline") -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, target = torch.randn(8, 3, 16, 16), torch.randint(0, 2, (8, 16, 16))
    pipe = pc.compile(
        model, 4, devices=["cpu", "cpu"], example_args=(x,), n_microbatches=4, loss_fn=F.cross_entropy, cost="analytic",
        schedule=schedule, batch_norm="each", dispatch=dispatch,
    )  # fmt: skip
    for _ in range(2):
        pipe.step(x, target=target)
    assert pipe.program.overlaps == schedule.overlaps
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_pairs_train_as_their_parts(dispatch: str) -> None:
    model = UNet(depth=2, width=4)
    pairs = pc.build_schedule("dualpipev-overlap", 4, 4)
    plain = gradients(copy.deepcopy(model), pc.build_schedule("dualpipev", 4, 4))
    for found, expected in zip(gradients(copy.deepcopy(model), pairs, dispatch), plain, strict=True):
        assert torch.equal(found, expected)
    torch.manual_seed(0)
    x, target = torch.randn(8, 3, 16, 16), torch.randint(0, 2, (8, 16, 16))
    for _ in range(2):
        for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            (F.cross_entropy(model(part), wanted) / 4).backward()
    for found, parameter in zip(plain, model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(found, parameter.grad)


def test_pairs_of_a_file_that_are_recomputed_and_split_train_as_well() -> None:
    model = UNet(depth=2, width=4)
    schedule = pc.Schedule.from_csv(str(pc.insert_overlap(pc.build_schedule("interleaved-zb", 4, 4, n_devices=2))))
    assert schedule.overlaps
    plain = gradients(copy.deepcopy(model), pc.build_schedule("interleaved-zb", 4, 4, n_devices=2))
    for found, expected in zip(gradients(copy.deepcopy(model), schedule), plain, strict=True):
        assert torch.equal(found, expected)
