"""What a stage holds: parameters, gradients, optimizer state, activations and received values in flight; and when that is too much."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs.optimizer_bytes import optimizer_state
from tests.support.eager import square_loss

X = torch.randn(8, 64)
WEIGHT = 4 * 64 * 64
SAVED = 4 * 2 * 64  # the input of one layer, two samples


def layers(n: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(n)])


def compiled(model: nn.Module, n_stages: int = 4, **options: object) -> pc.Pipeline:
    return pc.compile(
        model, n_stages, example_args=(X,), cost="analytic", devices=["cpu"] * n_stages, n_microbatches=4,
        loss_fn=square_loss, **options,
    )  # fmt: skip


def held(**options: object) -> list[float]:
    """What each of four stages of one layer holds, beside the weight and its gradient."""
    return [stage.memory - 2 * WEIGHT for stage in compiled(layers(), **options).plan.stages]


def test_activations_count_as_often_as_the_schedule_has_them_in_flight() -> None:
    assert held(schedule="1f1b") == [4 * SAVED, 3 * 2 * SAVED, 2 * 2 * SAVED, 2 * SAVED]
    assert held(schedule="gpipe") == [4 * SAVED, 4 * 2 * SAVED, 4 * 2 * SAVED, 4 * 2 * SAVED]


@pytest.mark.parametrize(("optimizer", "copies"), [(None, 0), ("sgd", 0), ("adam", 2), (torch.optim.Adagrad, 1)])
def test_the_optimizers_state_is_counted_by_its_kind(optimizer: object, copies: int) -> None:
    plain, kept = held(), held(optimizer=optimizer)
    assert [more - less for more, less in zip(kept, plain, strict=True)] == [copies * WEIGHT] * 4


def test_an_optimizer_is_asked_what_it_keeps() -> None:
    model = layers()
    assert optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1)) == 0
    assert optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) == 1
    assert optimizer_state(torch.optim.Adam(model.parameters(), amsgrad=True)) == 3
    assert optimizer_state(torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True)) == 3

    class Own(torch.optim.AdamW):
        """Known by what it keeps once it has stepped."""

    own = Own(model.parameters())
    with pytest.raises(pc.InputError, match="'Own' is not known"):
        optimizer_state(own)
    model(X).sum().backward()
    own.step()
    assert optimizer_state(own) == 2
    with pytest.raises(pc.InputError, match=r"optimizer=.*'adam'"):
        optimizer_state("adma")


def test_a_shared_parameter_is_held_once_by_each_stage_that_uses_it() -> None:
    model = layers()
    model[1].weight = model[0].weight
    model[3].weight = model[0].weight
    apart = compiled(model, tied="apart").plan
    assert [round(stage.memory / (2 * WEIGHT)) for stage in apart.stages] == [1, 1, 1, 1]
    pair = compiled(model, 2, tied="apart").plan
    assert [round(stage.memory / (2 * WEIGHT)) for stage in pair.stages] == [1, 2]  # 0 and 1 in one stage


def test_what_is_too_much_is_proven_and_the_limit_that_is_named_works() -> None:
    free = compiled(layers(8)).plan
    least = max(stage.memory for stage in free.stages)
    with pytest.raises(pc.InfeasibleError) as caught:
        compiled(layers(8), memory_limit=least / 2)
    text = str(caught.value)
    assert re.search(r"stage \d would hold \d+ bytes, its limit is \d+", text)
    limit = float(re.search(r"memory_limit=([\d.]+)", text)[1])
    assert compiled(layers(8), memory_limit=limit).plan.status == "optimal"
    with pytest.raises(pc.InfeasibleError):
        compiled(layers(8), memory_limit=limit * 0.999)


def test_the_number_of_stages_that_is_named_is_the_least_that_works() -> None:
    limit = 2 * WEIGHT + 16 * SAVED  # two layers are too many
    with pytest.raises(pc.InfeasibleError) as caught:
        compiled(layers(6), memory_limit=limit)
    enough = int(re.search(r"n_stages=(\d+)", str(caught.value))[1])
    assert enough == 6
    assert compiled(layers(6), enough, memory_limit=limit).plan.status == "optimal"
    with pytest.raises(pc.InfeasibleError):
        compiled(layers(6), enough - 1, memory_limit=limit)


def test_a_limit_moves_the_cut_of_a_network() -> None:
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())])
    x = torch.randn(8, 8, 16, 16)

    def cut(limit: list[float] | None) -> pc.Pipeline:
        return pc.compile(
            model, 2, example_args=(x,), cost="analytic", n_microbatches=4, devices=["cpu"] * 2, loss_fn=square_loss,
            memory_limit=limit, schedule="gpipe",
        )  # fmt: skip

    free = cut(None).plan
    first, second = (stage.memory for stage in free.stages)
    tight = cut([0.7 * first, 2 * second])
    assert tight.plan.stages[0].memory <= 0.7 * first
    assert tight.plan.stages[0].nodes < free.stages[0].nodes
    assert tight.plan.bottleneck > free.bottleneck
    assert tight.step(x).item() == pytest.approx(square_loss(model(x)).item(), rel=1e-4)


def test_limits_are_per_device() -> None:
    model, least = layers(8), 2 * WEIGHT
    pipe = compiled(model, 2, memory_limit=[3 * least, 7 * least])
    assert pipe.plan.stages[0].nodes <= 3
    for bad in (0, -1.0, "1", True):
        with pytest.raises(pc.InputError, match="memory_limit"):
            compiled(model, 2, memory_limit=bad)
