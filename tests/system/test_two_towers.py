"""Models with branches: towers run beside each other, hold what their depth needs, and train as in eager."""

from __future__ import annotations

import copy

import pytest
import torch

import pipecompile as pc
from tests.support.eager import accumulate, assert_same, square_loss
from tests.support.towers import Towers, pinned

COMMON = {"loss_fn": square_loss, "cost": "analytic", "bandwidth": 1e12}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zb-h1", "zb-h2", "gpipe", "auto"])
def test_two_towers_train_as_in_eager(schedule: str, dispatch: str) -> None:
    torch.manual_seed(0)
    model, x = Towers(2, depth=2), torch.randn(12, 16)
    reference = copy.deepcopy(model)
    pipe = pc.compile(
        model, 3, example_args=(x,), n_microbatches=6, devices=["cpu"] * 3, dispatch=dispatch, schedule=schedule,
        pin=pinned(2), **COMMON,
    )  # fmt: skip
    for _ in range(2):
        assert pipe.step(x) == pytest.approx(accumulate(reference, x, 6).item(), rel=1e-6)
    assert_same(model, reference)
    assert torch.equal(pipe(x), torch.cat([reference(part) for part in x.split(2)]))


def test_the_second_tower_warms_up_by_its_depth() -> None:
    model, x = Towers(7), torch.randn(64, 16)
    pipe = pc.compile(model, 8, example_args=(x,), n_microbatches=16, devices=["cpu"] * 8, pin=pinned(7), **COMMON)
    assert [row.split(",")[:4] for row in pipe.schedule.to_csv().splitlines()[:7]] == [
        [f"{s}F0", f"{s}F1", f"{s}B0", f"{s}F2"] for s in range(7)
    ]
    held = [stage.memory - stage.state_bytes for stage in pipe.plan.stages]
    assert held[:7] == [2 * stage.saved_bytes for stage in pipe.plan.stages[:7]]
    assert max(pipe.simulate().peak_in_flight[:7]) == 2


def test_measured_towers_run_beside_each_other() -> None:
    """Forwards of the towers on one micro-batch overlap in time, and the head follows both. Other processes may delay a thread."""
    torch.manual_seed(0)
    model, x = Towers(2, depth=2, width=512), torch.randn(1024, 512)
    pipe = pc.compile(
        model, 3, example_args=(x,), n_microbatches=4, devices=["cpu"] * 3, dispatch="threads", pin=pinned(2), **COMMON
    )
    overlaps = False
    for _ in range(20):
        pipe.step(x)
        assert pipe.measured is not None
        spans = {span.name: span for span in pipe.measured.spans}
        assert spans["2F0"].start >= max(spans["0F0"].end, spans["1F0"].end)
        overlaps = spans["1F0"].start < spans["0F0"].end and spans["0F0"].start < spans["1F0"].end
        if overlaps:
            break
    assert overlaps


def test_recordings_of_other_lengths_share_a_program_of_both_routes() -> None:
    """A list of micro-batches of several recordings runs under one schedule, legal for the routes of all."""
    torch.manual_seed(0)
    model = Towers(2, depth=1)
    reference = copy.deepcopy(model)
    pipe = pc.compile(model, 3, example_args=(torch.randn(4, 16),), n_microbatches=2, devices=["cpu"] * 3,
                      pin=pinned(2), **COMMON)  # fmt: skip
    parts = [torch.randn(2, 16), torch.randn(3, 5, 16), torch.randn(2, 16)]
    loss = pipe.step(microbatches=parts)
    expected = sum(square_loss(reference(part)) * len(part) for part in parts) / sum(map(len, parts))
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_towers_fit_where_a_chain_of_as_many_stages_does_not() -> None:
    model, x = Towers(5), torch.randn(192, 16)
    options = {"n_microbatches": 12, "devices": ["cpu"] * 6, "pin": pinned(5), **COMMON}
    free = pc.compile(model, 6, example_args=(x,), **options).plan
    limit = max(stage.memory for stage in free.stages)
    limited = pc.compile(Towers(5), 6, example_args=(x,), memory_limit=limit, **options)
    assert [stage.memory for stage in limited.plan.stages] == [stage.memory for stage in free.stages]
    limited.step(x)
    assert max(limited.simulate().peak_in_flight) == 2
    with pytest.raises(pc.InfeasibleError):
        pc.compile(Towers(5), 6, example_args=(x,), memory_limit=limit / 2, **options)
