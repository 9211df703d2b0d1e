"""Deferred BatchNorm: after a step, running statistics are those that one forward of the whole mini-batch would leave."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.errors import InputError
from pipecompile.runtime.cells.deferred_batchnorm import DeferredBatchNorm, DeferredNorm, DeferredNorms, joined_norms
from tests.support.eager import accumulate, assert_same, square_loss
from tests.support.models import UNet


class OwnForward(nn.BatchNorm2d):
    """As timm writes it: the layer calls the function and counts for itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = 0.0 if self.momentum is None else self.momentum
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, factor, self.eps
        ).relu()


def net(norm: nn.Module) -> nn.Sequential:
    """The first thing that happens is a BatchNorm, so it sees the same numbers in micro-batches as in a mini-batch."""
    return nn.Sequential(norm, nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))


def piped(model: nn.Module, **options: Any) -> pc.Pipeline:
    given = {"n_microbatches": 4, "cost": "analytic", "loss_fn": square_loss, "devices": ["cpu"] * 3} | options
    return pc.compile(model, 3, **{"batch_norm": "deferred", **given})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("samples", [8, 11, 3])
def test_running_statistics_of_the_whole_mini_batch(momentum: float | None, checkpoint: str, samples: int) -> None:
    torch.manual_seed(0)
    model = net(nn.BatchNorm2d(3, momentum=momentum))
    eager = copy.deepcopy(model)
    pipe = piped(model, checkpoint=checkpoint)
    for step in range(3):
        x = torch.randn(samples, 3, 6, 6) * (step + 1) + step
        pipe.step(x)
        eager(x)
    _assert_statistics(model, eager)


def _assert_statistics(model: nn.Module, eager: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_a_layer_with_a_forward_of_its_own(dispatch: str) -> None:
    torch.manual_seed(0)
    model = net(OwnForward(3))
    eager, x = copy.deepcopy(model), torch.randn(9, 3, 6, 6)
    pipe = piped(model, dispatch=dispatch)
    for _ in range(2):
        pipe.step(x)
        eager(x)
    _assert_statistics(model, eager)


def test_calls_too_once_forward_is_over() -> None:
    torch.manual_seed(0)
    model = net(nn.BatchNorm2d(3))
    eager, x = copy.deepcopy(model), torch.randn(9, 3, 6, 6)
    pipe = piped(model)
    made = pipe(x)
    eager(x)
    _assert_statistics(model, eager)
    made.sum().backward()
    _assert_statistics(model, eager)
    with torch.no_grad():
        pipe(x)
        eager(x)
    _assert_statistics(model, eager)
    pipe.eval()
    pipe(x)
    _assert_statistics(model, eager)


class Uncounted(nn.BatchNorm2d):
    """A layer that calls the function and counts nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training, momentum=0.3)


LAYERS = {
    "usual": lambda: nn.BatchNorm2d(3),
    "cumulative": lambda: nn.BatchNorm2d(3, momentum=None),
    "of the user": lambda: OwnForward(3),
    "uncounted": lambda: Uncounted(3),
    "frozen": lambda: nn.BatchNorm2d(3).eval(),
    "without statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "of instances": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
    "of processes": lambda: nn.SyncBatchNorm(3),
}


class Twice(nn.Module):
    """Two calls of one layer, on inputs with different statistics. What comes before does not depend on the batch."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 3, 1), norm, nn.Conv2d(3, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.norm(h) + self.norm(3 * x + 1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("checkpoint", "call"), [("never", "step"), ("always", "step"), ("always", "call"), ("except_last", "call")]
)
def test_statistics_and_counts_of_every_kind_of_layer(kind: str, checkpoint: str, call: str) -> None:
    """A layer that is called twice is updated twice, each time with the statistics of that call."""
    torch.manual_seed(0)
    norm = LAYERS[kind]()
    model = Twice(norm)
    eager = copy.deepcopy(model)
    eager.norm = copy.deepcopy(norm) if not isinstance(norm, nn.SyncBatchNorm) else nn.BatchNorm2d(3)
    pipe = piped(model, checkpoint=checkpoint)
    for samples in (8, 7):
        x = torch.randn(samples, 3, 6, 6) * samples
        if call == "step":
            pipe.step(x)
        else:
            pipe(x).square().mean().backward()
        eager(x)
    _assert_statistics(model, eager)


def test_a_counter_that_is_loaded_after_a_failed_step_stays() -> None:
    model = net(nn.BatchNorm2d(3))
    pipe, x = piped(model), torch.randn(8, 3, 6, 6)
    pipe.step(x)
    state = copy.deepcopy(pipe.state_dict())
    handle = model[1].register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(pc.RunError):
        pipe.step(x)
    handle.remove()
    assert int(model[0].num_batches_tracked) == 1
    state["0.num_batches_tracked"] += 10
    pipe.load_state_dict(state)
    pipe.step(x)
    assert int(model[0].num_batches_tracked) == 12


def test_gradients_are_those_of_the_micro_batched_loop() -> None:
    torch.manual_seed(0)
    model, x = UNet(depth=2), torch.randn(8, 3, 16, 16)
    eager = copy.deepcopy(model)
    loss = piped(model).step(x)
    torch.testing.assert_close(loss, accumulate(eager, x, 4), rtol=0, atol=0)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_failed_step_leaves_the_statistics_alone() -> None:
    model = net(nn.BatchNorm2d(3))
    before = copy.deepcopy(dict(model.named_buffers()))
    fails = True

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        if fails and isinstance(output.data_ptr(), int):
            raise ZeroDivisionError
        return square_loss(output)

    pipe = piped(model, loss_fn=loss_fn)
    x = torch.randn(8, 3, 6, 6)
    with pytest.raises(pc.RunError):
        pipe.step(x)
    fails = False
    eager = net(nn.BatchNorm2d(3))
    eager[0].load_state_dict({**eager[0].state_dict(), **{n.removeprefix("0."): b for n, b in before.items()}})
    pipe.step(x)
    eager(x)
    _assert_statistics(model, eager)


def test_who_did_not_say_is_told_how_many_layers_there_are() -> None:
    x = torch.randn(8, 3, 16, 16)
    with pytest.warns(pc.RecordingWarning, match="10 BatchNorm layers .* batch_norm='deferred'"):
        piped(UNet(depth=2), example_args=(x,), batch_norm=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.RecordingWarning)
        piped(UNet(depth=2), example_args=(x,), batch_norm="each").step(x)
        piped(UNet(depth=2).eval(), example_args=(x,), batch_norm=None).step(x)
        piped(UNet(depth=2), example_args=(x,), batch_norm=None, n_microbatches=1).step(x)
    with pytest.raises(pc.InputError, match="batch_norm='sync' is not known"):
        piped(UNet(depth=2), batch_norm="sync")


@pytest.mark.parametrize("batch_norm", ["each", "deferred"])
def test_in_one_process_synchronised_layers_are_like_any_other(batch_norm: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    x = torch.randn(9, 8)
    for m in (model, plain):
        pc.compile(m, 2, n_microbatches=4, batch_norm=batch_norm, cost="analytic", loss_fn=square_loss).step(x)
    assert_same(model, plain)


def test_statistics_of_all_recordings_are_merged_once() -> None:
    layer, values = nn.BatchNorm1d(3), torch.randn(9, 3)
    recordings = [DeferredNorm(layer), DeferredNorm(layer)]
    layers = [DeferredBatchNorm(norm.new_call()) for norm in recordings]
    norms = joined_norms([DeferredNorms((norm,)) for norm in recordings])
    norms.begin()
    layers[0](values[:4])
    layers[1](values[4:])
    norms.settle()
    torch.testing.assert_close(layer.running_mean, 0.1 * values.mean(0))
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * values.var(0))
    assert layer.num_batches_tracked == 1
    own = DeferredNorms((recordings[1],))  # a recording that runs alone afterwards
    own.begin()
    layers[1](values)
    own.settle()
    assert layer.num_batches_tracked == 2


def test_a_run_that_fails_unlinks_the_recordings() -> None:
    layer = nn.BatchNorm1d(3)
    recordings = [DeferredNorm(layer), DeferredNorm(layer)]
    calls = [norm.new_call() for norm in recordings]
    norms = joined_norms([DeferredNorms((norm,)) for norm in recordings])
    norms.begin()
    assert calls[1].receiver is calls[0]
    norms.forget()
    assert calls[1].receiver is None


def test_layers_that_run_differently_often_are_refused() -> None:
    layer = nn.BatchNorm1d(3)
    recordings = [DeferredNorm(layer), DeferredNorm(layer)]
    for norm, times in zip(recordings, (1, 2), strict=True):
        for _ in range(times):
            norm.new_call()
    with pytest.raises(InputError, match="runs 1 times in one micro-batch and 2 times in another"):
        joined_norms([DeferredNorms((norm,)) for norm in recordings])
