"""Regions that the user checkpoints stay recomputed: less memory, and outputs, losses, gradients and buffers of the plain loop."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from memory import peaks
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipecompile as pc
from tests.support.checkpointed import Net, built, compiled
from tests.support.eager import accumulate, assert_same, square_loss

REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("checkpoint_stages", ["never", "always"])
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@REENTRANT
def test_a_step_equals_the_plain_loop(reentrant, schedule, dispatch, checkpoint_stages):
    model, eager = built(lambda: Net(reentrant))
    x = torch.randn(8, 4)
    pipe = compiled(
        model, x, n_microbatches=4, schedule=schedule, dispatch=dispatch, checkpoint=checkpoint_stages,
        split_before=["blocks.1.down", "blocks.3"],
    )  # fmt: skip
    for _ in range(2):
        assert torch.equal(pipe.step(x), accumulate(eager, x, 4))
    assert_same(model, eager)


@REENTRANT
def test_calls_and_evaluation_equal_eager(reentrant):
    model, eager = built(lambda: Net(reentrant, norm=True))
    x = torch.randn(8, 4)
    pipe = compiled(model, x)
    for is_training in (True, False):
        pipe.train(is_training)
        eager.train(is_training)
        for run in (pipe, eager):
            output = run(x)
            square_loss(output).backward()
        assert torch.equal(output, pipe(x)) or is_training
        if is_training:
            eager(x)  # the call of the line above
        assert_same(model, eager)
        with torch.no_grad():
            assert torch.equal(pipe(x), eager(x))
            assert torch.equal(pipe.step(x), square_loss(eager(x)))
        assert_same(model, eager)


@REENTRANT
def test_batch_norm_in_a_region_is_counted_as_eager_counts(reentrant):
    """Refused before: the recording had dissolved the region, and counted once."""
    model, eager = built(lambda: Net(reentrant, norm=True))
    x = torch.randn(8, 4)
    pipe = compiled(model, x)
    pipe.step(x)
    accumulate(eager, x, 1)
    assert int(model.blocks[0].norm.num_batches_tracked) == 2
    assert_same(model, eager)
    with pytest.warns(pc.RecordingWarning, match="in the order of the schedule"):
        compiled(model, x, n_microbatches=2).step(x)
    accumulate(eager, x, 2)
    assert int(model.blocks[0].norm.num_batches_tracked) == int(eager.blocks[0].norm.num_batches_tracked)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpoint_stages", ["never", "always"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_is_updated_by_the_whole_batch_and_once_more_by_the_recomputation(
    momentum, checkpoint_stages
):
    model, eager = built(lambda: Net(False, norm=True))
    for block in (*model.blocks, *eager.blocks):
        block.norm.momentum = momentum
    x = torch.randn(8, 4)
    norm, whole = model.blocks[0].norm, eager.blocks[0].norm  # the first: its input does not depend on the division
    pipe = compiled(model, x, n_microbatches=4, batch_norm="deferred", checkpoint=checkpoint_stages)
    for _ in range(2):
        pipe.step(x)
        accumulate(eager, x, 1)
    torch.testing.assert_close(norm.running_mean, whole.running_mean)
    torch.testing.assert_close(norm.running_var, whole.running_var)
    assert int(norm.num_batches_tracked) == int(whole.num_batches_tracked) == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_in_a_call_is_updated_by_its_backward_too(momentum):
    model, eager = built(lambda: Net(False, norm=True))
    x = torch.randn(8, 4)
    for block in (*model.blocks, *eager.blocks):
        block.norm.momentum = momentum
    norm, whole = model.blocks[0].norm, eager.blocks[0].norm
    pipe = compiled(model, x, n_microbatches=4, batch_norm="deferred")
    for count in (2, 4):
        for run in (pipe, eager):
            square_loss(run(x)).backward()
        assert int(norm.num_batches_tracked) == int(whole.num_batches_tracked) == count
        torch.testing.assert_close(norm.running_mean, whole.running_mean)
        torch.testing.assert_close(norm.running_var, whole.running_var)


def held(pipe: pc.Pipeline, layer: nn.Module, run: Callable[[], Any]) -> Iterator[bool]:
    """Yield, per forward of a layer, whether its output is still alive when the run has made its forwards."""
    made: list[weakref.ref[Any]] = []
    with layer.register_forward_hook(lambda _module, _args, output: made.append(weakref.ref(output))):
        result = run()
        yield from [reference() is not None for reference in made]
        del result


@REENTRANT
def test_nothing_inside_a_region_is_kept_until_its_backward(reentrant):
    """All of it was kept: memory grew in silence."""
    model, _ = built(lambda: Net(reentrant))
    x = torch.randn(8, 4)
    pipe = compiled(model, x, check=False)
    assert list(held(pipe, model.blocks[1].up, lambda: pipe(x))) == [False]
    assert list(held(pipe, model.first, lambda: pipe(x))) == [True]


class Convolutions(nn.Module):
    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        layers = (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(layers), nn.Tanh()) for _ in range(6))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.last(x).tanh()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_peaks_are_those_simulated_and_a_fraction_of_those_without_regions(schedule):
    x = torch.randn(8, 3, 32, 32)
    peak_of = {}
    for is_checkpointed in (True, False):
        pipe = compiled(
            Convolutions(is_checkpointed=is_checkpointed), x, n_microbatches=4, schedule=schedule, dispatch="inline",
            check=False, split_before=["blocks.2", "blocks.4"],
        )  # fmt: skip
        peak_of[is_checkpointed] = peaks(pipe, lambda pipe: pipe.step(x))
        for simulated, measured in peak_of[is_checkpointed]:
            assert 0.75 * simulated < measured < 1.1 * simulated
    for (_, recomputed), (_, kept) in zip(peak_of[True], peak_of[False], strict=True):
        assert recomputed < 0.6 * kept


def test_a_backward_costs_the_recomputation_too():
    x = torch.randn(8, 3, 32, 32)
    plain, recomputed = (
        compiled(Convolutions(is_checkpointed=on), x, split_before=["blocks.2", "blocks.4"]).plan.stages[1]
        for on in (False, True)
    )
    assert recomputed.forward == plain.forward
    assert recomputed.backward == pytest.approx(plain.backward + plain.forward)
    assert recomputed.saved_bytes < 0.5 * plain.saved_bytes


@pytest.mark.sampled(2)
@REENTRANT
def test_compiled_stages_recompute_and_count_as_eager(reentrant):
    model, eager = built(lambda: Net(reentrant, norm=True))
    x = torch.randn(8, 4)
    compiled(model, x, 2, compile_stages="aot_eager").step(x)
    accumulate(eager, x, 1)
    assert_same(model, eager, 1e-5)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x).relu()


def test_a_counter_in_a_region_is_warned_of():
    """Eager advances it again in the recomputation."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.counting = nn.Linear(4, 4), Counting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.counting, self.first(x), use_reentrant=False)

    with pytest.warns(pc.RecordingWarning, match="changes counting.calls in a region of torch.utils.checkpoint"):
        compiled(Model(), torch.randn(4, 4), 1)
