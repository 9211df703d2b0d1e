"""`step(microbatches=[...])` equals the loop over the user's micro-batches; `pipe(microbatches=[...])` gives their outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.errors import InputError, RunError, ScheduleError

SHAPES = ((3, 5), (2, 9), (3, 7), (2, 9))
"""(samples, length) of the micro-batches."""


class Net(nn.Module):
    """A BatchNorm over samples and places; long sequences take another way, with other values between the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3, padding=1)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.a(x)).relu()
        gate = h.mean(-1, keepdim=True) if x.shape[-1] > 6 else None
        h = self.b(h) if gate is None else self.b(h) + gate
        h = self.drop(h if gate is None else h * gate)
        return self.head(h.mean(-1)), h


def loss_of(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[0], target)


def microbatches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(b, 2, t, generator=generator), torch.randint(3, (b,), generator=generator)) for b, t in SHAPES]


def models(*, train: bool = True) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Net().train(train)
    return model, copy.deepcopy(model)


def piped(model: nn.Module, **options: Any) -> pc.Pipeline:
    usual: dict[str, Any] = {"devices": ["cpu"] * 2, "n_microbatches": 3, "loss_fn": loss_of, "cost": "analytic"}
    return pc.compile(model, 2, **{"batch_norm": "each", **usual, **options})


def looped(model: nn.Module) -> float:
    """Run the loop that the list stands for: each micro-batch by its share of the samples."""
    total, listed = 0.0, microbatches()
    samples = sum(len(x) for x, _ in listed)
    for x, target in listed:
        loss = loss_of(model(x), target) * (len(x) / samples)
        loss.backward()
        total += float(loss.detach())
    return total


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("train", "checkpoint", "dispatch", "schedule"),
    [
        (True, "never", "inline", "1f1b"),
        (True, "always", "threads", "gpipe"),
        (True, "always", "inline", "zb-h1"),
        (False, "never", "threads", "1f1b"),
    ],
)
def test_a_step_equals_the_loop(train: bool, checkpoint: str, dispatch: str, schedule: str) -> None:
    model, plain = models(train=train)
    pipe = piped(model, checkpoint=checkpoint, dispatch=dispatch, schedule=schedule)
    assert float(pipe.step(microbatches=microbatches())) == pytest.approx(looped(plain), rel=1e-5)
    assert_equal(model, plain)
    for mine, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, other)
    assert pipe.program.n_microbatches == 4
    assert pipe.measured is not None


def test_the_second_step_records_nothing_and_lowers_nothing() -> None:
    model, plain = models()
    pipe = piped(model)
    pipe.step(microbatches=microbatches())
    program = pipe.program
    pipe.step(microbatches=microbatches()[::-1])  # another order of the recordings
    assert pipe.program is program
    assert len(pipe.explain().kept) == 3
    looped(plain), looped(plain)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    cuts = {tuple(stage.nodes) for stage in pipe.stages}
    pipe.step(
        torch.randn(6, 2, 5), target=torch.zeros(6, dtype=torch.long)
    )  # a mini-batch as ever, by a kept recording
    assert len(pipe.explain().kept) == 3
    assert cuts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_deferred_statistics_are_those_of_all_micro_batches(checkpoint: str, dispatch: str) -> None:
    model, plain = models()
    pipe = piped(model, batch_norm="deferred", checkpoint=checkpoint, dispatch=dispatch)
    pipe.step(microbatches=microbatches())
    values = torch.cat([plain.a(x).transpose(0, 1).flatten(1) for x, _ in microbatches()], 1)
    torch.testing.assert_close(model.norm.running_mean, 0.1 * values.mean(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.norm.running_var, 0.9 + 0.1 * values.var(1), rtol=1e-5, atol=1e-6)
    assert model.norm.num_batches_tracked == 1
    pipe.step(microbatches()[0][0].repeat(2, 1, 1), target=torch.zeros(6, dtype=torch.long))
    assert model.norm.num_batches_tracked == 2


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_call_gives_an_output_per_micro_batch_and_one_backward(checkpoint: str) -> None:
    model, plain = models()
    pipe = piped(model, checkpoint=checkpoint)
    mine = [x.requires_grad_() for x, _ in microbatches()]
    other = [x.detach().clone().requires_grad_() for x in mine]
    outputs, expected = pipe(microbatches=mine[:1] + [{"x": x} for x in mine[1:]]), [plain(x) for x in other]
    for one, two in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one, two)
    sum(one[0].square().sum() + one[1].sum() for one in outputs).backward()
    sum(one[0].square().sum() + one[1].sum() for one in expected).backward()
    assert_equal(model, plain)
    for x, y in zip(mine, other, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    again = pipe(microbatches=mine)
    again[0][0].sum().backward()
    with pytest.raises(InputError, match="one backward of the sum of all losses"):
        again[1][0].sum().backward()


def test_calls_without_gradients_and_in_eval_mode() -> None:
    model, plain = models(train=False)
    with torch.no_grad():
        outputs = piped(model)(microbatches=[x for x, _ in microbatches()])
        for one, (x, _) in zip(outputs, microbatches(), strict=True):
            torch.testing.assert_close(one, plain(x))


def test_no_grad_gives_the_loss_alone_and_aux_comes_per_micro_batch() -> None:
    model, plain = models(train=False)

    def with_aux(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return loss_of(output, target), output[1].shape

    pipe = piped(model, loss_fn=with_aux, has_aux=True)
    with torch.no_grad():
        loss, aux = pipe.step(microbatches=microbatches())
    assert [tuple(shape) for shape in aux] == [(b, 4, t) for b, t in SHAPES]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert float(loss) == pytest.approx(looped(plain), rel=1e-5)


def test_inputs_get_gradients_and_a_scaler_scales_them() -> None:
    model, plain = models()
    pipe, listed = piped(model), microbatches()
    before = [x.requires_grad_() for x, _ in listed]
    pipe.step(microbatches=[(x * 2, y) for x, y in listed], scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    samples = sum(map(len, before))
    for x, y in microbatches():
        own = x.requires_grad_()
        (loss_of(plain(own * 2), y) * len(x) / samples * 8).backward()
        torch.testing.assert_close(before.pop(0).grad, own.grad, rtol=1e-4, atol=1e-6)
    assert_equal(model, plain)


def test_compiling_for_a_list_and_leaving_choices_open() -> None:
    model, plain = models()
    pipe = piped(model, n_microbatches="auto", schedule="auto", example_kwargs={"microbatches": microbatches()})
    assert pipe.plan.considered is not None
    assert float(pipe.step(microbatches=microbatches())) == pytest.approx(looped(plain), rel=1e-5)
    assert pipe.evaluate([pc.Microbatch(*one[:1], target=one[1]) for one in microbatches()]).samples == 10


def test_a_batch_of_tuples_of_single_samples_is_a_list_too() -> None:
    model, _ = models(train=False)
    pipe = piped(model)
    listed = [(x[:1], y[:1]) for x, y in microbatches()]
    assert pipe.step(microbatches=listed).isfinite()


def test_what_is_refused() -> None:
    model, _ = models()
    pipe, listed = piped(model), microbatches()
    with pytest.raises(InputError, match="microbatches is given together with target"):
        pipe.step(microbatches=listed, target=listed[0][1])
    with pytest.raises(InputError, match="microbatches is given together with arguments"):
        pipe.step(listed[0][0], microbatches=listed)
    with pytest.raises(InputError, match="microbatches is given together with x"):
        pipe(microbatches=listed, x=listed[0][0])
    with pytest.raises(InputError, match="microbatches is empty"):
        pipe.step(microbatches=[])
    fixed = piped(model, n_microbatches=None, schedule=pc.build_schedule("1f1b", 2, 3))
    with pytest.raises(ScheduleError, match="the schedule is for 3 micro-batches, the batch gives 4"):
        fixed.step(microbatches=listed)


def test_a_failure_names_its_micro_batch_and_the_line() -> None:
    model, _ = models()
    pipe, listed = piped(model), microbatches()
    pipe.step(microbatches=listed)
    listed[1] = (listed[1][0], torch.tensor([7, 7]))
    with pytest.raises(RunError, match="micro-batch 1"):
        pipe.step(microbatches=listed)
    pipe.step(microbatches=microbatches())


def test_random_numbers_in_another_order_are_warned_of() -> None:
    """A step over a mini-batch warned, and one over a list did not."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Dropout(0.5))))
    pipe = pc.compile(
        model, 4, devices=["cpu"] * 2, schedule="interleaved", n_microbatches=4, loss_fn=F.cross_entropy, cost="analytic"
    )  # fmt: skip
    listed = [(torch.randn(2, 4), torch.randint(4, (2,))) for _ in range(4)]
    with pytest.warns(pc.RecordingWarning, match="random numbers are drawn in stages 0, 1, 2, 3, which run in the ord"):
        pipe.step(microbatches=listed)


class Named(nn.Module):
    """A model with an argument of this name keeps it."""

    def forward(self, x: torch.Tensor, microbatches: int = 1) -> torch.Tensor:
        return x * microbatches


def test_a_model_may_have_an_argument_of_this_name() -> None:
    pipe = pc.compile(Named(), 1, devices=["cpu"], n_microbatches=1)
    assert torch.equal(pipe(torch.ones(2), microbatches=3), 3 * torch.ones(2))
