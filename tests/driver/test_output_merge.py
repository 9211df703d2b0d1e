"""A specialization whose outputs need a tail gets stages without the tail; the first one stays as it is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)
        self.b.weight = nn.Parameter(self.a.weight.detach().new_ones(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.b(self.a(x).relu())
        return y.flip(0)[:3], y.std(0)


def test_stages_leave_the_tail_out_and_a_step_keeps_it() -> None:
    model = Model()
    eager, x = copy.deepcopy(model), torch.randn(8, 3)
    pipe = pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=8, loss_fn=lambda out: out[0].square().mean()
    )
    torch.testing.assert_close(pipe(x), eager(x))  # micro-batches of one sample have no deviation
    pipe.reschedule(n_microbatches=2)
    torch.testing.assert_close(pipe(x), eager(x))
    assert any("flip" in stage.module.code for stage in pipe.stages)
    pipe.step(x)
    assert model.a.weight.grad is not None
    pipe.reschedule(n_microbatches=1)
    torch.testing.assert_close(pipe(x), eager(x))


def test_a_tail_with_autocast_and_inputs_of_the_model() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (y.flip(0) @ y.mT.flip(0)) * t.cumsum(0)[:, None]

    model = Cast()
    x, t = torch.randn(6, 3), torch.randn(6, requires_grad=True)
    pipe = pc.compile(model, 1, cost="analytic", devices=["cpu"], n_microbatches=3)
    with pytest.warns(pc.RecordingWarning, match="samples of a batch meet"):
        output = pipe(x, t)
    expected = model(x, t)
    assert output.dtype is expected.dtype
    torch.testing.assert_close(output, expected)
    mine, theirs = (torch.autograd.grad(out.sum(), t)[0] for out in (output, expected))
    torch.testing.assert_close(mine, theirs)


class RunningMean(nn.Module):
    """Rows minus a mean over the batches so far, which every forward updates."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(3, 4), nn.Linear(4, 4), what
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.what == "replaced":
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            return self.b(h - self.mean)
        before = self.b(h - self.mean)
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return {"before": before, "behind": self.b(h - self.mean), "mean": self.mean.clone()}[self.what]


@pytest.mark.parametrize("what", ["behind", "mean", "replaced"])
def test_what_reads_state_that_each_micro_batch_changes_is_refused(what: str) -> None:
    """A value that replaces a buffer was averaged over the micro-batches, and the output was that of no loop and of no whole batch."""
    pipe = pc.compile(RunningMean(what), 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=3)
    with pytest.raises(pc.InputError, match="state of the model that every micro-batch changes"):
        pipe(torch.randn(6, 3))


def test_rows_that_read_state_before_it_changes_are_those_of_a_loop() -> None:
    model = RunningMean("before")
    eager, x = copy.deepcopy(model), torch.randn(6, 3)
    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=3)
    torch.testing.assert_close(pipe(x), torch.cat([eager(part) for part in x.tensor_split(3)]))
    torch.testing.assert_close(model.mean, eager.mean)


def at_most_four(x: torch.Tensor) -> torch.Tensor:
    if len(x) > 4:
        raise ValueError("too many samples at once")
    return x * 2


class Retried(nn.Module):
    """Another computation for batches that a function refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        try:
            return self.b(at_most_four(y))
        except ValueError:
            return self.b(y.relu())


@pytest.mark.parametrize(("samples", "warns"), [(4, False), (8, True)])
def test_a_branch_that_the_whole_mini_batch_takes_otherwise_is_warned_of(samples: int, warns: bool) -> None:
    model, x = Retried(), torch.randn(samples, 3)
    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = pipe(x)
    assert torch.equal(output, torch.cat([model(part) for part in x.chunk(2)]))
    assert torch.allclose(output, model(x)) != warns  # up to rounding: kernels may round two rows otherwise than four
    assert any("at_most_four (batch_size <= 4): pipe(x) goes" in str(one.message) for one in caught) == warns


class Checked(nn.Module):
    """Code that is kept whole names a buffer: it reads it, or writes it in a branch that is not taken."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.a, self.b, self.writes = nn.Linear(3, 4), nn.Linear(4, 4), writes
        self.register_buffer("mean", torch.ones(4))

    def read(self, h: torch.Tensor) -> torch.Tensor:
        return h * float(h.detach().square().sum() >= 0) - self.mean.to(h.dtype)

    def write(self, h: torch.Tensor) -> torch.Tensor:
        if float(h.detach().square().sum()) < 0:
            self.mean.add_(1)
        return h - self.mean.to(h.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h = self.write(h) if self.writes else self.read(h)
        return self.b(h * self.mean).std(0)


@pytest.mark.parametrize("writes", [False, True])
def test_a_buffer_that_code_kept_whole_only_reads_is_no_state_that_changes(writes: bool) -> None:
    model = Checked(writes=writes)
    pipe, x = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=3), torch.randn(6, 3)
    if writes:
        with pytest.raises(pc.InputError, match="state of the model that every micro-batch changes"):
            pipe(x)
    else:
        torch.testing.assert_close(pipe(x), model(x))


class Sampled(nn.Module):
    """Takes features that it draws for all samples, as a sparse attention in evaluation mode does; its samples meet if `is_centered`."""

    def __init__(self, *, is_centered: bool, in_place: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.is_centered, self.in_place = nn.Linear(3, 4), nn.Linear(4, 4), is_centered, in_place

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = torch.zeros(2, dtype=torch.long)
        if self.in_place:
            chosen.random_(0, 4)
        else:
            chosen = torch.randint(0, 4, (2,))
        h = self.a(x)
        if self.is_centered:
            return (self.b(h - h.cumsum(0))[:, chosen],)
        return self.b(h)[:, chosen], chosen + 1


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("is_centered", [False, True])
def test_random_values_that_all_samples_share_are_not_put_together(is_centered: bool, in_place: bool) -> None:
    """The value of one of the micro-batches was taken: the output was that of no loop and of no whole batch, silently."""
    model = Sampled(is_centered=is_centered, in_place=in_place).eval()
    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=2)
    why = "random numbers are drawn behind" if is_centered else "every micro-batch draws its own"
    with pytest.raises(pc.InputError, match=why):
        pipe(torch.randn(6, 3))


def test_rows_that_take_shared_random_values_are_those_of_a_loop() -> None:
    class Rows(Sampled):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x)[0]

    model, x = Rows(is_centered=False).eval(), torch.randn(6, 3)
    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=2)
    pipe(x)
    torch.manual_seed(1)
    wanted = torch.cat([model(part) for part in x.tensor_split(2)])
    torch.manual_seed(1)
    assert torch.equal(pipe(x), wanted)
