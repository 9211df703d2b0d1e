"""Steps on slices: what is found once, and what each step checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from pipecompile.driver import sliced_steps
from pipecompile.errors import InputError, PlanError
from tests.support.decoders import Decoder, token_loss, tokens_and_labels
from tests.system.test_sliced_training import sliced


def test_a_slice_is_recorded_and_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("slice_stages", "compare_outputs", "compare_losses"):
        original = getattr(sliced_steps, name)
        monkeypatch.setattr(sliced_steps, name, lambda *a, n=name, f=original: calls.append(n) or f(*a))
    pipe = sliced(Decoder(), 2, 4)
    for _ in range(3):
        tokens, labels = tokens_and_labels()
        pipe.step(tokens, target=labels)
    assert calls == ["slice_stages", "compare_outputs", "compare_losses"]


def test_gradients_add_up_over_steps() -> None:
    model, (tokens, labels) = Decoder().double(), tokens_and_labels()
    pipe = sliced(model, 2, 4)
    pipe.step(tokens, target=labels)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    pipe.step(tokens, target=labels)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [2 * one for one in once])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_hook_is_refused_before_it_runs(is_late: bool) -> None:
    """A list of 2 lengths had 13: those of slices, and of trial runs."""
    model, (tokens, labels), seen = Decoder(), tokens_and_labels(), []
    pipe = sliced(model, 2, 4)
    if is_late:
        pipe.step(tokens, target=labels)
    model.blocks[1].up.register_forward_hook(lambda _, __, y: seen.append(y.shape[1]))
    with pytest.raises(PlanError, match=r"blocks\.1\.up"):
        pipe.step(tokens, target=labels)
    assert not seen


def test_a_target_is_required() -> None:
    with pytest.raises(InputError, match="loss_fn takes a target"):
        sliced(Decoder(), 2, 4).step(tokens_and_labels()[0])


def test_lengths_that_do_not_divide_are_refused() -> None:
    tokens, labels = tokens_and_labels(length=14)
    with pytest.raises(InputError, match="14 positions cannot be divided into 4 equal slices"):
        sliced(Decoder(), 2, 4).step(tokens, target=labels)


def test_frozen_weights_get_no_gradient() -> None:
    model, (tokens, labels) = Decoder(), tokens_and_labels()
    model.embed.weight.requires_grad_(False)
    for parameter in (*model.positions.parameters(), *model.blocks[0].parameters()):
        parameter.requires_grad_(False)
    sliced(model, 2, 4).step(tokens, target=labels)
    assert model.blocks[0].qkv.weight.grad is None
    assert model.blocks[1].qkv.weight.grad is not None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.scale = Decoder(), 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(tokens) * self.scale


def test_numbers_of_the_model_may_change() -> None:
    model, (tokens, labels) = Scaled().double(), tokens_and_labels()
    pipe = sliced(model, 2, 4)
    for scale in (1.0, 2.0, 3.0):
        model.scale = scale
        loss = pipe.step(tokens, target=labels).item()
        assert loss == pytest.approx(token_loss(model(tokens), labels).item(), rel=1e-10)


def test_a_recording_for_other_numbers_of_samples_is_refused() -> None:
    tokens, labels = tokens_and_labels()
    pipe = sliced(Decoder(), 2, 4)
    pipe.step(tokens, target=labels)
    form = pipe._cache.latest.slicing[4].specialization
    form.facts = replace(form.facts, batch_size=2)
    pipe.step(tokens, target=labels)
    with pytest.raises(PlanError, match="not right for micro-batches of 1 and 2 samples"):
        pipe.step(tokens[:3], target=labels[:3])
