"""A loss may not read what a stage before the last writes: that stage may be micro-batches ahead."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecompile as pc


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.center.mul_(0.9).add_(x.detach().mean(0))
        return x - self.center


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.centre, self.scale, self.tail = Centre(), nn.Buffer(torch.ones(2)), nn.Buffer(torch.ones(()))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.centre(self.norm(self.first(x)))
        self.count += 1
        y = self.last(h)
        self.tail.mul_(0.9).add_(y.detach().mean())
        return y


def error(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def part_of_loss(loss, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    part = loss(model(x), y) / 4
    part.backward()
    return part.detach()


READS = {
    "centre.center": lambda model: lambda y, t: error(y, t) * model.centre.center.norm(),
    "norm.running_mean": lambda model: lambda y, t: error(y, t) + y.mean() * model.norm.running_mean.norm(),
    "norm.num_batches_tracked": lambda model: lambda y, t: error(y, t) * model.norm.num_batches_tracked,
}


def piped(model: nn.Module, x: Tensor, loss, **options) -> pc.Pipeline:
    usual = {
        "n_microbatches": 4,
        "batch_norm": "each",
        "cost": "analytic",
        "split_before": ["last"],
        "pin": {"centre": 0},
        "devices": ["cpu"] * 2,
    } | options
    return pc.compile(model, 2, example_args=(x,), loss_fn=loss, **usual)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", READS)
def test_a_buffer_that_an_earlier_stage_writes_is_refused_before_anything_runs(name, loss_reduction):
    model, x, y = Counting(), torch.randn(8, 4), torch.randn(8, 2)
    pipe = piped(model, x, READS[name](model), loss_reduction=loss_reduction)
    with pytest.raises(
        pc.InputError, match=rf"(?s)loss reads the buffer '{name}', which stage 0 writes.*test_loss_reads.py:\d+ in"
    ):
        pipe.step(x, target=y)
    assert not model.centre.center.any()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_list_of_micro_batches_is_refused_as_well():
    model, x, y = Counting(), torch.randn(8, 4), torch.randn(8, 2)
    pipe = piped(model, x, READS["centre.center"](model))
    parts = [pc.Microbatch(a, target=b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    with pytest.raises(pc.InputError, match=r"reads the buffer 'centre\.center'"):
        pipe.step(microbatches=parts)
    assert not model.centre.center.any()


@pytest.mark.parametrize("name", READS)
def test_one_micro_batch_reads_what_it_wrote(name):
    model, x, y = Counting(), torch.randn(8, 4), torch.randn(8, 2)
    eager = copy.deepcopy(model)
    pipe = piped(model, x, READS[name](model), n_microbatches=1)
    assert torch.equal(pipe.step(x, target=y), READS[name](eager)(eager(x), y))


def test_buffers_that_no_earlier_stage_writes_are_read():
    """The last stage writes one of them, and the forward counts in Python, in the order of the losses."""
    model, x, y = Counting(), torch.randn(8, 4), torch.randn(8, 2)
    eager = copy.deepcopy(model)

    def loss_of(model: Counting):
        return lambda y, t: ((y - t).square() * model.scale).mean() * model.tail * model.count

    pipe = piped(model, x, loss_of(model))
    for _ in range(3):
        loss = pipe.step(x, target=y)
        parts = [part_of_loss(loss_of(eager), eager, a, b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
        torch.testing.assert_close(loss, sum(parts))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad)


def test_a_loss_that_is_zero_before_the_first_step_trains_in_it():
    """The shares of micro-batches were all 0, since the loss was when they were measured: the step had no loss and no gradients."""
    model, x, y = Counting(), torch.randn(8, 4), torch.randn(8, 2)
    pipe = piped(model, x, lambda y, t: error(y, t) * model.count)
    assert pipe.step(x, target=y) > 0
    assert model.last.weight.grad.any()


def writes_centre(model: nn.Module):
    def loss(y: Tensor, t: Tensor) -> Tensor:
        model.scale.add_(y.detach().mean())
        return error(y, t)

    return loss


def gives_other_memory(model: nn.Module):
    def loss(y: Tensor, t: Tensor) -> Tensor:
        model.scale.data = model.scale + y.detach().mean()
        return error(y, t)

    return loss


def clamps_a_weight(model: nn.Module):
    def loss(y: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            model.first.weight.clamp_(-0.1, 0.1)
        return error(y, t)

    return loss


class Scaled(nn.Module):
    """The first stage reads a buffer, the last another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.scale, self.tail = nn.Buffer(torch.ones(8)), nn.Buffer(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.scale) + self.tail


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("writes", "name"),
    [
        (writes_centre, "buffer 'scale'"),
        (gives_other_memory, "buffer 'scale'"),
        (clamps_a_weight, "parameter 'first.weight'"),
    ],
)
def test_a_loss_that_writes_what_an_earlier_stage_reads_is_refused(writes, name, loss_reduction):
    """Later micro-batches read it before or after the write, as it happened; the numbers of one process and of threads differed."""
    model, x, y = Scaled(), torch.randn(8, 4), torch.randn(8, 2)
    before = copy.deepcopy(model.state_dict())
    pipe = piped(model, x, writes(model), pin={}, loss_reduction=loss_reduction)
    with pytest.raises(pc.InputError, match=rf"the loss writes the {name}, which stage 0 reads"):
        pipe.step(x, target=y)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


PIPE: Any = None


def writes_by_way_of_the_pipeline(y: Tensor, t: Tensor) -> Tensor:
    PIPE.model.scale.add_(y.detach().mean())
    return error(y, t)


def test_a_write_by_way_of_the_pipeline_is_refused_as_well(monkeypatch: pytest.MonkeyPatch):
    model, x, y = Scaled(), torch.randn(8, 4), torch.randn(8, 2)
    pipe = piped(model, x, writes_by_way_of_the_pipeline, pin={})
    monkeypatch.setitem(globals(), "PIPE", pipe)
    with pytest.raises(pc.InputError, match="the loss writes the buffer 'scale', which stage 0 reads"):
        pipe.step(x, target=y)
    assert torch.equal(model.scale, torch.ones(8))


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_a_loss_writes_what_the_last_stage_reads(dispatch: str):
    model, x, y = Scaled(), torch.randn(8, 4), torch.randn(8, 2)
    eager = copy.deepcopy(model)

    def loss_of(model: nn.Module):
        def loss(y: Tensor, t: Tensor) -> Tensor:
            model.tail.mul_(0.5)
            return error(y, t)

        return loss

    pipe = piped(model, x, loss_of(model), pin={}, dispatch=dispatch)
    for _ in range(2):
        loss = pipe.step(x, target=y)
        parts = [part_of_loss(loss_of(eager), eager, a, b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
        torch.testing.assert_close(loss, sum(parts))
    assert torch.equal(model.tail, eager.tail)


FEATURES: dict[str, Tensor] = {}


def reads_features(y: Tensor, t: Tensor) -> Tensor:
    return error(y, t) + FEATURES.get("first", y).square().mean()


def leave(features: dict[str, Tensor]):
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        features["first"] = output.detach()

    return hook


def reads_what_it_closes_over(features: dict[str, Tensor]):
    return lambda y, t: error(y, t) + features["first"].square().mean() if features else error(y, t)


LEFT: dict[str, Tensor] = {}
CRITERION = nn.MSELoss()


@pytest.mark.parametrize(
    ("loss", "features", "dispatch", "is_warned"),
    [
        (reads_features, FEATURES, "threads", True),
        (reads_what_it_closes_over(LEFT), LEFT, "threads", True),
        (reads_features, FEATURES, "inline", False),
        (error, FEATURES, "threads", False),
        (lambda y, t: CRITERION(y, t), FEATURES, "threads", False),
    ],
)
def test_a_loss_that_may_read_what_hooks_of_earlier_stages_left_is_warned_of_in_threads(
    loss, features, dispatch, is_warned
):
    """Those stages run ahead: the loss read the features of another micro-batch, without a word."""
    model, x, y = Scaled(), torch.randn(8, 4), torch.randn(8, 2)
    model.first.register_forward_hook(leave(features))
    pipe = piped(model, x, loss, pin={}, dispatch=dispatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(x, target=y)
    assert any("lets these stages run ahead" in str(one.message) for one in caught) is is_warned


def test_a_device_with_several_stages_runs_ahead_as_threads_do():
    """The loss read numbers and lists of another micro-batch, without a word."""
    model, x, y = Scaled(), torch.randn(8, 4), torch.randn(8, 2)
    model.first.register_forward_hook(leave(FEATURES))
    pipe = piped(model, x, reads_features, pin={}, schedule="gpipe", devices=["cpu"])
    with pytest.warns(pc.RecordingWarning, match="a device with several stages lets these stages run ahead"):
        pipe.step(x, target=y)


class Listing(nn.Module):
    """Leaves its values in a list, or in an attribute."""

    def __init__(self, reads):
        super().__init__()
        self.layer, self.reads, self.seen = nn.Linear(4, 4), reads, []

    def forward(self, x):
        y = self.layer(x).tanh()
        if self.reads == "seen":
            self.seen.append(y)
        else:
            self.last = y
        return y


@pytest.mark.parametrize(("reads", "is_warned"), [("seen", True), ("last", False)])
def test_lists_that_a_forward_leaves_are_warned_of_where_stages_run_ahead(reads, is_warned):
    """The loss read what later micro-batches had appended, without a word."""
    model = nn.Sequential(Listing(reads), nn.Linear(4, 4), Listing(reads), nn.Linear(4, 2))
    x, y = torch.randn(8, 4), torch.randn(8, 2)

    def loss(output, target):
        left = [*model[0].seen] if reads == "seen" else [model[0].last]
        model[0].seen.clear()
        return nn.functional.mse_loss(output, target) + sum(one.square().mean() for one in left)

    options = {"schedule": "interleaved", "devices": ["cpu"] * 2, "cost": "analytic"}
    pipe = pc.compile(model, 4, n_microbatches=4, loss_fn=loss, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(x, target=y)
    assert any("lets these stages run ahead" in str(one.message) for one in caught) is is_warned
