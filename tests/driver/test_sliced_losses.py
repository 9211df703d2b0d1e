"""The weights of the losses of slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.batching.microbatches import LossDivisor
from pipecompile.driver.loss_analysis import LossAnalysis
from pipecompile.driver.sliced_losses import slice_weights
from pipecompile.errors import PlanError
from tests.support.decoders import Decoder, tokens_and_labels
from tests.system.test_sliced_training import sliced

MEAN = MergeRule(MergeKind.AVERAGED)


def test_slices_weigh_as_much_as_they_count() -> None:
    labels = [torch.tensor(one) for one in ([1, 1, 1, -100], [1, -100, -100, -100], [-100] * 4, [1, 1, 1, 1])]
    analysis = LossAnalysis(LossDivisor(("t",), is_target=True), MEAN)
    weights, tensor = slice_weights(analysis, (1,) * 4, [{"t": one} for one in labels], mean=True)
    assert weights == [3 / 8, 1 / 8, 0.0, 0.5]
    assert tensor.dtype is torch.float64
    whole = [{"t": torch.ones(4)}] * 4
    assert slice_weights(analysis, (1,) * 4, whole, mean=True)[0] == [0.25] * 4


def test_slices_without_a_divisor_weigh_as_much_as_their_samples() -> None:
    assert slice_weights(LossAnalysis(None, MEAN), (3, 3, 1, 1), [], mean=True)[0] == [3 / 8, 3 / 8, 1 / 8, 1 / 8]
    assert slice_weights(LossAnalysis(None, MEAN), (3, 3), [], mean=False)[0] == [1.0, 1.0]


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def test_sums_add_up() -> None:
    model, (tokens, labels) = Decoder().double(), tokens_and_labels(ignored=True)
    pipe = sliced(model, 2, 4, loss_fn=summed, loss_reduction="sum")
    assert pipe.step(tokens, target=labels).item() == pytest.approx(summed(model(tokens), labels).item(), rel=1e-10)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (summed, "the loss is not a mean over positions"),
        (lambda y, t: F.cross_entropy(y[:, -1], t[:, -1]), "the loss cannot run on slices"),
        (lambda y, t: F.cross_entropy(y[t > 3], t[t > 3]), "the loss function cannot be recorded"),
        (lambda y, t: (y[..., 0] * torch.arange(y.shape[1])).mean(), "the loss depends on where a slice begins"),
        (lambda y, t: t.float().mean() * y.new_ones(()), "the loss is not a mean|the loss cannot run"),
    ],
)
def test_losses_that_do_not_add_up_are_refused(loss_fn: Any, words: str) -> None:
    tokens, labels = tokens_and_labels()
    with pytest.raises(PlanError, match=words) as caught:
        sliced(Decoder(), 2, 4, loss_fn=loss_fn).step(tokens, target=labels)
    assert caught.value.hint
