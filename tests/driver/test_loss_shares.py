"""Losses that divide by what counts: loss and gradients of a step are eager's on the mini-batch, for any split."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

LABELS = torch.tensor(
    [[1, 2, 0], [-100, 2, -100], [-100, -100, 4], [0, -100, -100], [-100, -100, -100], [-100] * 3, [3, 3, 1]]
)


def tokens(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten())


def masked(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counted = (labels != -100).float()
    each = y.mean(-1).sub(labels.clamp(min=0)).square()
    return (each * counted).sum() / counted.sum().clamp(min=1)


class Tagger(nn.Module):
    """A class for each of 3 tokens; with `loss`, the model computes its loss."""

    def __init__(self, loss: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(4, 8), nn.Linear(8, 5), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.b(self.a(x).tanh())
        return y if self.loss is None else {"loss": self.loss(y, labels), "logits": y}


WEIGHTED = nn.CrossEntropyLoss(torch.arange(1.0, 6.0))


def ratio_of_means(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counted = (labels != -100).float()
    return (y.square().mean(-1) * counted).mean() / counted.mean()


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "ignored tokens": tokens,
    "classes in dimension 1": lambda y, labels: F.cross_entropy(y.mT, labels),
    "class weights": lambda y, labels: F.cross_entropy(y.mT, labels, torch.arange(1.0, 6.0)),
    "a module with weights": lambda y, labels: WEIGHTED(y.mT, labels),
    "shifted labels": lambda y, labels: tokens(y[:, :-1], labels[:, 1:]),
    "another class is ignored": lambda y, labels: F.cross_entropy(y.mT, labels.clamp(min=-1), ignore_index=-1),
    "a class of the scores is ignored": lambda y, labels: F.cross_entropy(y.mT, labels.clamp(min=0), ignore_index=2),
    "smoothed, 255 is ignored": lambda y, labels: F.cross_entropy(
        y.flatten(0, 1), labels.where(labels >= 0, 255).flatten(), ignore_index=255, label_smoothing=0.1
    ),
    "a mask": masked,
    "a mask without a least count": lambda y, labels: (y.mean(-1) * (labels > 0)).sum() / (labels > 0).sum(),
    "a ratio of means": ratio_of_means,
    "two heads and a constant": lambda y, labels: tokens(y, labels) + 0.4 * tokens(-y, labels) + 1.0,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_what_counts_is_that_of_the_mini_batch(name: str, own: bool) -> None:
    torch.manual_seed(0)
    loss_fn = LOSSES[name]
    model = Tagger(loss_fn if own else None)
    eager, x = copy.deepcopy(model), torch.randn(7, 3, 4)
    pipe = pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=4, loss_fn=None if own else loss_fn
    )
    for labels in (LABELS, LABELS.flip(0), LABELS.clamp(min=0)):
        model.zero_grad()
        eager.zero_grad()
        loss = pipe.step(x, labels=labels) if own else pipe.step(x, target=labels)
        expected = eager(x, labels)["loss"] if own else loss_fn(eager(x), labels)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


class Padded(nn.Module):
    """Tokens as rows, the mask of the input among the outputs; with `dim` 1, the batch is dimension 1."""

    def __init__(self, *, is_flat: bool, dim: int = 0) -> None:
        super().__init__()
        self.a, self.is_flat, self.dim = nn.Linear(4, 5), is_flat, dim

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        if self.is_flat:
            return y.flatten(0, 1)
        return {"y": y, "mask": x[..., 0] > 0}


def of_output(output: Any) -> torch.Tensor:
    return (output["y"].square().mean(-1) * output["mask"]).sum() / output["mask"].sum()


FORMS: dict[str, tuple[nn.Module, Callable[..., torch.Tensor], dict[str, int], bool]] = {
    "no target": (Padded(is_flat=False), of_output, {}, False),
    "no target, a selection": (Padded(is_flat=False), lambda o: o["y"][o["mask"]].square().mean(), {}, False),
    "what a mask selects": (Tagger(), lambda y, t: F.cross_entropy(y[t >= 0], t[t >= 0]), {}, True),
    "several rows per sample": (Padded(is_flat=True), lambda y, t: F.cross_entropy(y, t.flatten()), {}, True),
    "batch_dims": (Padded(is_flat=False), lambda o, t: tokens(o["y"], t), {"x": 1, "target": 1}, True),
}


@pytest.mark.parametrize("name", FORMS)
def test_any_form_of_a_call_divides_by_what_counts(name: str) -> None:
    torch.manual_seed(0)
    model, loss_fn, batch_dims, has_target = FORMS[name]
    eager, x = copy.deepcopy(model), torch.randn(7, 3, 4)
    labels = LABELS
    if batch_dims:
        x, labels = x.transpose(0, 1).contiguous(), labels.T.contiguous()
    target = {"target": labels} if has_target else {}
    pipe = pc.compile(
        model, 1, cost="analytic", devices=["cpu"], n_microbatches=4, loss_fn=loss_fn, batch_dims=batch_dims
    )
    loss = pipe.step(x, **target)
    expected = loss_fn(eager(x), *target.values())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"checkpoint": "always"}, {"schedule": "zb-h1"}, {"dispatch": "threads"}])
def test_a_micro_batch_without_labels_is_no_nan(options: dict[str, Any]) -> None:
    model = Tagger()
    eager, x = copy.deepcopy(model), torch.randn(7, 3, 4)
    loss_fn = LOSSES["a mask without a least count"]
    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=7, loss_fn=loss_fn, **options)
    loss = pipe.step(x, target=LABELS)
    expected = loss_fn(eager(x), LABELS)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_loss_without_a_gradient_is_the_error_of_eager(is_frozen: bool, count: int, checkpoint: str) -> None:
    model = Tagger()
    model.requires_grad_(not is_frozen)
    loss_fn = tokens if is_frozen else lambda y, labels: tokens(y, labels).detach()
    pipe = pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=count, loss_fn=loss_fn, checkpoint=checkpoint
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn") as error:
            pipe.step(torch.randn(7, 3, 4), target=LABELS)
        assert isinstance(error.value, pc.PipecompileError)


def test_plain_classes_keep_the_shares_of_the_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    pipe = pc.compile(model, 1, cost="analytic", devices=["cpu"], n_microbatches=3, loss_fn=F.cross_entropy)
    eager, x, target = copy.deepcopy(model), torch.randn(7, 4), torch.randint(5, (7,))
    loss = pipe.step(x, target=target)
    expected = sum(
        F.cross_entropy(eager(a), b) * (len(a) / 7)
        for a, b in zip(x.tensor_split(3), target.tensor_split(3), strict=True)
    )
    assert torch.equal(loss, expected.detach())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda y, labels: F.cross_entropy(y.mT, labels, reduction="sum"), "is a sum"),
        (
            lambda y, labels: (y.mean((1, 2)) * labels[:, 0]).softmax(0).square().sum(),
            r"not recognised .samples meet at test_loss_shares.py:\d+.*across_batch=.exact",
        ),
        (lambda y, labels: tokens(y / y.std(), labels), "was not recognised"),
        *(
            (
                lambda y, t, n=n: F.cross_entropy(y.mT, t.clamp(n, 4), ignore_index=n) + y.exp().mean(),
                "was not recognised",
            )
            for n in (-100, -1, 3)
        ),
        (
            lambda y, t: sum(F.cross_entropy(y[:, 0], one[:, 0].abs(), ignore_index=100) for one in (t, t.flip(0))),
            "was not recognised",
        ),
    ],
)
def test_a_loss_that_micro_batches_change_is_told_in_the_first_step(
    loss_fn: Callable[..., torch.Tensor], words: str
) -> None:
    pipe = pc.compile(Tagger(), 1, cost="analytic", devices=["cpu"], n_microbatches=2, loss_fn=loss_fn)
    with pytest.warns(pc.RecordingWarning, match=words):
        pipe.step(torch.randn(7, 3, 4), target=LABELS)


def test_a_loss_that_fails_is_not_warned_of_and_a_loss_that_mixes_samples_is_once_a_step_has_run() -> None:
    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y, labels, reduction="sum") * y.detach().std()

    torch.manual_seed(0)
    pipe = pc.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), 2, n_microbatches=2, cost="analytic", loss_fn=loss
    )
    x = torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(pc.RunError):
            pipe.step(x, target=torch.randn(4, 3))
    with pytest.warns(pc.RecordingWarning, match="was not recognised"):
        pipe.step(x, target=torch.randn(4, 2))


class Ordered(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.drawn(x)

    def drawn(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randperm(len(x))[:, None] * torch.ones(len(x), 1).cumsum(0)


def test_a_loss_of_outputs_that_do_not_merge_is_not_measured_on_outputs_of_another_shape() -> None:
    pipe = pc.compile(Ordered(4, 4), 1, n_microbatches=2, loss_fn=F.mse_loss, cost="analytic")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
    assert not [one for one in caught if "target size" in str(one.message)]  # a warning of F.mse_loss


def test_missing_numbers_do_not_count() -> None:
    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return y.mean(-1).square().masked_fill(labels == -100, torch.nan).nanmean()

    eager, x = Tagger(), torch.randn(7, 3, 4)
    expected = loss(eager(x), LABELS)
    expected.backward()
    for own in (False, True):
        model = Tagger(loss if own else None)
        model.load_state_dict(eager.state_dict())
        example = (x, LABELS) if own else (x,)
        pipe = pc.compile(
            model, 2, example_args=example, n_microbatches=3, cost="analytic", loss_fn=None if own else loss
        )
        found = pipe(x, LABELS)["loss"] if own else pipe.step(x, target=LABELS)
        if own:
            found.backward()
        torch.testing.assert_close(found, expected)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
