"""Training loops as people write them, each beside the same loop in eager: equal to the last bit, parameters included."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, assert_same
from tests.test_pipeline import Net, batch, piped

SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "1f1b", "dispatch": "threads"},
    {"schedule": "zb-h1"},
    {"schedule": "zb-h1", "checkpoint": "always"},
    {"schedule": "gpipe", "checkpoint": "always"},
    {"schedule": "zbv", "n_stages": 4, "devices": ["cpu", "cpu"], "checkpoint": "except_last"},
]


class Untied(Net):
    """A tied gradient is summed stage by stage, so it would not be equal to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.third.bias = nn.Parameter(torch.rand(8))


def pair(seed: int = 0) -> tuple[Net, Net]:
    torch.manual_seed(seed)
    model = Untied()
    return model, copy.deepcopy(model)


class Mixed(Untied):
    """A part as around, a part in bfloat16, a part in float32."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        skip = torch.relu(self.norm(self.first(x)))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.second(skip)
        with torch.autocast("cpu", enabled=False):
            return self.last(self.third(torch.relu(hidden.float())) * scale + skip.float())


def same_parameters(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, ours), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, other), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_autocast_around_the_step_and_inside_the_model(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Mixed()
    eager, (x, target) = copy.deepcopy(model), batch(9)
    pipe = piped(model, batch_norm="each", **options)
    for dtype in (torch.float16, None):
        model.zero_grad(), eager.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = pipe.step(x, target=target)
            expected = accumulate(eager, x, 4, F.cross_entropy, target)
        assert torch.equal(loss, expected)
        assert_same(model, eager)


class Thrice(nn.Module):
    """A value that three layers cast, with what is around the step, or in a region of its own."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype, self.first, self.last = dtype, nn.Linear(8, 8), nn.Linear(8, 4)
        self.heads = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)).float()
        with torch.autocast("cpu", self.dtype) if self.dtype else nullcontext():
            return self.last(sum(head(hidden) for head in self.heads)).float()  # type: ignore[arg-type]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_each_cast_of_a_value_has_a_gradient_of_its_own(options: dict[str, Any], inside: bool) -> None:
    torch.manual_seed(0)
    model, (x, target) = Thrice(torch.bfloat16 if inside else None), batch(9)
    eager = copy.deepcopy(model)
    options = dict(options)
    pipe = piped(model, options.pop("n_stages", 2), split_before=["heads.0"], **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        assert torch.equal(pipe.step(x, target=target), accumulate(eager, x, 4, F.cross_entropy, target))
    assert_same(model, eager)


def scaled_loop(model: nn.Module, x: torch.Tensor, target: torch.Tensor, scaler: torch.amp.GradScaler) -> torch.Tensor:
    """`accumulate` under a scaler."""
    total = torch.zeros(())
    for part, wanted in zip(torch.tensor_split(x, 4), torch.tensor_split(target, 4), strict=True):
        loss = F.cross_entropy(model(part), wanted) * (len(part) / len(x))
        scaler.scale(loss).backward()
        total = total + loss.detach()
    return total


@pytest.mark.parametrize("options", SCHEDULES[:3], ids=str)
def test_a_scaler_scales_the_gradients_and_not_the_loss(options: dict[str, Any]) -> None:
    (model, eager), (x, target) = pair(), batch()
    pipe = piped(model, batch_norm="each", **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, eager)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2) for _ in range(2)]
    skipped = 0
    for _ in range(30):
        with torch.autocast("cpu", torch.float16):
            loss = pipe.step(x, target=target, scaler=scalers[0])
            assert torch.equal(loss, scaled_loop(eager, x, target, scalers[1]))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for optimizer, scaler, m in zip(optimizers, scalers, (model, eager), strict=True):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        same_parameters(model, eager)
        skipped += all(map(torch.equal, before, model.parameters()))
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert 0 < skipped < 30  # it overflowed, came down, and trained


def test_a_scaler_that_is_off_and_one_around_a_call() -> None:
    (model, eager), (x, target) = pair(), batch()
    pipe = piped(model.eval(), batch_norm="each")
    pipe.step(x, target=target, scaler=torch.amp.GradScaler("cpu", enabled=False))
    accumulate(eager.eval(), x, 4, F.cross_entropy, target)
    assert_same(model, eager)
    model.zero_grad()
    torch.amp.GradScaler("cpu", init_scale=4.0).scale(F.cross_entropy(pipe(x), target)).backward()
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, 4 * other.grad)


OPTIMIZERS = [(torch.optim.AdamW, {"foreach": True}), (torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9, "foreach": True})]  # fmt: skip


@pytest.mark.parametrize(("kind", "given"), OPTIMIZERS, ids=str)
def test_accumulation_groups_clipping_and_schedules_of_the_learning_rate(kind: Any, given: dict[str, Any]) -> None:
    (model, eager), (x, target) = pair(), batch()
    pipe = piped(model, batch_norm="each", schedule="zb-h1")
    optimizers = [kind(m.last.parameters(), lr=1e-2, **given) for m in (model, eager)]
    rates = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    for update in range(3):
        for share in range(2):
            pipe.step(x + share, target=target)
            accumulate(eager, x + share, 4, F.cross_entropy, target)
        norms = [pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)]
        assert torch.equal(norms[0], norms[1])
        for optimizer, rate, m in zip(optimizers, rates, (model, eager), strict=True):
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            m.zero_grad()
            if update == 0:
                optimizer.add_param_group({"params": [*m.first.parameters(), *m.second.parameters()], "lr": 1e-3})
        same_parameters(model, eager)


def test_two_pipelines_take_turns() -> None:
    pairs = [pair(seed) for seed in (0, 1)]
    x, target = batch()
    options = {"dispatch": "threads", "batch_norm": "each"}
    pipes = [piped(model, schedule=name, **options) for (model, _), name in zip(pairs, ("1f1b", "zb-h1"), strict=True)]
    for _ in range(3):
        for pipe, (_, eager) in zip(pipes, pairs, strict=True):
            pipe.step(x, target=target)
            accumulate(eager, x, 4, F.cross_entropy, target)
    for model, eager in pairs:
        assert_same(model, eager)
    outer = nn.Sequential(nn.Linear(8, 8), pipes[0], nn.Linear(4, 8), pipes[1]).eval()  # and one after the other
    plain = nn.Sequential(copy.deepcopy(outer[0]), pairs[0][1], copy.deepcopy(outer[2]), pairs[1][1]).eval()
    outer.zero_grad(), plain.zero_grad()
    outer(x).sum().backward()
    plain(x).sum().backward()
    for mine, other in zip(outer.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def pickled(pipe: pc.Pipeline) -> pc.Pipeline:
    made: pc.Pipeline = pickle.loads(pickle.dumps(pipe))
    return made


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_has_a_model_of_its_own_and_the_same_cut(copied: Any) -> None:
    (model, eager), (x, target) = pair(), batch()
    pipe = piped(model, batch_norm="each", dispatch="threads")
    pipe.step(x, target=target)
    other = copied(pipe)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    model.zero_grad(), other.zero_grad()
    accumulate(eager, x, 4, F.cross_entropy, target)
    eager.zero_grad()
    other.eval()  # the first call of the copy is of another kind than the one that was planned
    with torch.no_grad():
        torch.testing.assert_close(other(x), copy.deepcopy(eager).eval()(x))
    other.train()
    loss = other.step(x, target=target)
    assert torch.equal(loss, accumulate(eager, x, 4, F.cross_entropy, target))
    assert_same(other.model, eager)
    assert other.plan == pipe.plan
    assert model.first.weight.grad is None


def with_metrics(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = F.cross_entropy(output, target)
    return loss, {"hits": (output.argmax(1) == target).sum(), "parts": [loss * 2, len(target)]}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", SCHEDULES[::2], ids=str)
def test_what_comes_beside_the_loss_is_returned_for_each_micro_batch(options: dict[str, Any]) -> None:
    (model, eager), (x, target) = pair(), batch(9)
    pipe = piped(model, loss_fn=with_metrics, has_aux=True, batch_norm="each", **options)
    for _ in range(2):
        loss, aux = pipe.step(x, target=target)
    expected = copy.deepcopy(eager)
    parts = [with_metrics(eager(a), b) for a, b in zip(x.tensor_split(4), target.tensor_split(4), strict=True)]
    assert [found["hits"].item() for found in aux] == [metrics["hits"].item() for _, metrics in parts]
    assert [found["parts"][1] for found in aux] == [3, 2, 2, 2]
    for found, (_, metrics) in zip(aux, parts, strict=True):
        assert torch.equal(found["parts"][0], metrics["parts"][0])
        assert not found["parts"][0].requires_grad
    for _ in range(2):
        assert torch.equal(loss, accumulate(expected, x, 4, F.cross_entropy, target))
    assert_same(model, expected)


def test_what_comes_beside_the_loss_has_to_be_asked_for() -> None:
    (model, _), (x, target) = pair(), batch()
    with pytest.raises(pc.InputError, match="without a loss_fn"):
        piped(model, loss_fn=None, has_aux=True)
    with pytest.raises(pc.RunError, match=r"has_aux=True\) if it returns"):
        piped(model, loss_fn=with_metrics, batch_norm="each").step(x, target=target)
    with pytest.raises(pc.RunError, match="loss_fn returned a Tensor"):
        piped(model, has_aux=True, batch_norm="each").step(x, target=target)


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x).square().mean(), self.scale.exp(), self.shift


def test_scalars_of_parameters_in_a_stacked_loss_train() -> None:
    """The gradients of `exp` and `shift` lie in one memory; the second micro-batch added to both, and `scale` got 1.5 times its gradient."""
    model, x = Scalars(), torch.randn(4, 4)

    def loss_fn(output: Any) -> torch.Tensor:
        return torch.stack(list(output)).sum()

    pipe = pc.compile(
        model, 3, n_microbatches=2, loss_fn=loss_fn, cost="analytic", devices=["cpu"] * 3, schedule="gpipe"
    )
    pipe.step(x)
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    for part in x.chunk(2):
        (loss_fn(model(part)) / 2).backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_the_weights_of_losses_do_not_become_gradients_of_parameters() -> None:
    """In double precision, autograd made the memory of a micro-batch's weight the `.grad` of `shift`: later steps had other weights."""
    model, x = Scalars().double(), torch.randn(4, 4, dtype=torch.float64)

    def loss_fn(output: Any) -> torch.Tensor:
        return torch.stack(list(output)).sum()

    one_by_one = pc.Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    pipe = pc.compile(
        model, 2, n_microbatches=2, loss_fn=loss_fn, cost="analytic", devices=["cpu"] * 2, schedule=one_by_one
    )
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        pipe.step(x)
        assert model.shift.grad == 1.0
        torch.testing.assert_close(model.scale.grad, model.scale.detach().exp())
