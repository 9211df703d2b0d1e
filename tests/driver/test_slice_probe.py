"""Outputs and losses on slices are compared with those on the whole before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipecompile.driver.slice_probe import compare_losses, compare_outputs
from pipecompile.errors import PlanError
from pipecompile.runtime.cells.sliced import SlicedPositions
from tests.support.decoders import Decoder, token_loss, tokens_and_labels
from tests.system.test_sliced_training import sliced


def test_an_error_of_the_analysis_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlicedPositions, "forward", lambda _, positions: positions)
    tokens, labels = tokens_and_labels()
    with pytest.raises(PlanError, match="the model gives other results on slices of a sequence than on the whole"):
        sliced(Decoder(), 2, 4).step(tokens, target=labels)


def test_a_wrong_weight_is_found() -> None:
    output, target = torch.randn(2, 8, 20), torch.randint(20, (2, 8))
    outputs, targets = (output, [*output.chunk(2, 1)]), (target, [*target.chunk(2, 1)])
    compare_losses(token_loss, outputs, targets, [0.5, 0.5])
    with pytest.raises(PlanError, match="the loss gives other results on slices"):
        compare_losses(token_loss, outputs, targets, [0.5, 0.6])


def test_a_loss_without_target() -> None:
    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    output = torch.randn(2, 8)
    compare_losses(loss, (output, [*output.chunk(4, 1)]), (None, [None] * 4), [0.25] * 4)


def test_outputs_of_slices_are_joined() -> None:
    tokens, _ = tokens_and_labels()
    model = Decoder()
    pipe = sliced(model, 2, 4, example_args=(tokens,))
    whole = pipe._cache.latest
    stages, (name,) = whole.slicing[4], whole.inputs
    call: Any = pipe._flatten((tokens,), {})
    output, parts = compare_outputs(whole, stages, call, [{name: part} for part in tokens.chunk(4, 1)], 4)
    torch.testing.assert_close(torch.cat(parts, 1), output)
    torch.testing.assert_close(output, model(tokens))
