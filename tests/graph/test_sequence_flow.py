"""Models that compute positions by themselves run on slices; all others are refused, with the user's line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.errors import PlanError
from pipecompile.graph.sequence_flow import SequenceFlow
from tests.support.decoders import WIDTH, Between, Decoder, tokens_and_labels

Function = Callable[[nn.Module, Tensor], Tensor]


def attention(x: Tensor, **options: object) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options)  # type: ignore[arg-type]


def flow_of(model: nn.Module) -> SequenceFlow:
    graphs = [pc.trace(model, tokens_and_labels(3, length)[0]) for length in (4, 16)]
    return SequenceFlow(*graphs, 4, 4)


RUN: dict[str, Function] = {
    "linear": lambda _, x: F.linear(x, torch.eye(WIDTH)),
    "features": lambda _, x: x.softmax(-1) + x.mean(-1, keepdim=True) - x.cumsum(2),
    "flat": lambda _, x: F.gelu(x.reshape(-1, WIDTH)).view(x.shape),
    "moved": lambda _, x: x.transpose(0, 1).relu().transpose(0, 1),
    "tables": lambda _, x: x + torch.ones(1, 32, WIDTH)[:, : x.shape[1]],
    "arange": lambda _, x: x * torch.arange(x.shape[1])[:, None].to(x),
    "rotated": lambda _, x: torch.cat((-x[..., 8:], x[..., :8]), -1),
    "causal": lambda _, x: attention(x, is_causal=True),
    "mask": lambda _, x: attention(x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()),
    "normed": lambda _, x: F.rms_norm(F.layer_norm(x, (WIDTH,)), (WIDTH,)),
}


@pytest.mark.parametrize("name", RUN)
def test_calls_that_keep_positions_apart(name: str) -> None:
    flow = flow_of(Between(RUN[name]))
    found = len(flow.attentions), len(flow.positions), len(flow.tables)
    assert found == (int(name in ("causal", "mask")), int(name == "arange"), int(name == "tables"))


REFUSED: dict[str, tuple[Function, str]] = {
    "mean": (lambda _, x: x + x.mean(1, keepdim=True), "mean"),
    "mean by hand": (lambda _, x: x + x.sum(1, keepdim=True) / x.shape[1], "sum"),
    "cumsum": (lambda _, x: x.cumsum(1), "cumsum"),
    "softmax": (lambda _, x: x.softmax(-2), "softmax"),
    "shift": (lambda _, x: torch.cat([x[:, :1], x[:, :-1]], 1), "getitem"),
    "half": (lambda _, x: x[:, : x.shape[1] // 2].repeat(1, 2, 1), "getitem"),
    "last": (lambda _, x: x + x[:, -1:], "getitem"),
    "flip": (lambda _, x: x.flip(1), "flip"),
    "roll": (lambda _, x: x.roll(1, 1), "roll"),
    "length": (lambda _, x: x / x.shape[1], "div"),
    "other order": (lambda _, x: x.transpose(1, 2).reshape(x.shape), "reshape"),
    "samples": (lambda _, x: x + x.transpose(0, 1).reshape(x.shape), "reshape"),
    "products": (lambda _, x: (x @ x.transpose(1, 2)) @ x, "matmul"),
    "sizes": (lambda _, x: F.layer_norm(x, x.shape[1:]), "layer_norm"),
    "from the end": (lambda _, x: x * torch.arange(x.shape[1] - 1, -1, -1)[:, None].to(x), "to"),
    "from 1": (lambda _, x: x * torch.arange(1, x.shape[1] + 1)[:, None].to(x), "to"),
    "not causal": (lambda _, x: attention(x), "scaled_dot_product_attention"),
    "window": (
        lambda _, x: attention(x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-2)),
        "scaled_dot_product_attention",
    ),
    "dropout": (lambda _, x: F.dropout(x, 0.1), "dropout"),
    "dropped attention": (lambda _, x: attention(x, is_causal=True, dropout_p=0.1), "scaled_dot_product_attention"),
    "norm": (lambda _, x: x / x.norm(), "norm"),
}

LAYERS: dict[str, tuple[nn.Module, Function]] = {
    "BatchNorm1d": (nn.BatchNorm1d(WIDTH), lambda m, x: m.layer(x.transpose(1, 2)).transpose(1, 2)),
    "Conv1d": (nn.Conv1d(WIDTH, WIDTH, 3, padding=1), lambda m, x: m.layer(x.transpose(1, 2)).transpose(1, 2)),
    "LSTM": (nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda m, x: m.layer(x)[0]),
    "Dropout": (nn.Dropout(0.1), lambda m, x: m.layer(x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_may_mix_positions_are_refused(name: str) -> None:
    function, word = REFUSED[name]
    with pytest.raises(PlanError, match=f"the model cannot run on slices of a sequence: {word}") as caught:
        flow_of(Between(function))
    assert "test_sequence_flow.py" in caught.value.where
    assert caught.value.why
    assert 'schedule="1f1b"' in caught.value.hint


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_may_mix_positions_are_refused(name: str) -> None:
    layer, function = LAYERS[name]
    with pytest.raises(PlanError, match="the model cannot run on slices of a sequence: layer"):
        flow_of(Between(function, layer=layer))


def counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x


def test_a_value_that_is_left_on_the_model_is_refused() -> None:
    """It was counted neither once per micro-batch nor once per slice, silently."""
    model = Between(counted)
    model.calls = 0
    with pytest.raises(PlanError, match="the model cannot run on slices of a sequence: advance") as caught:
        flow_of(model)
    assert "once per slice" in caught.value.why


def test_another_path_for_another_length_is_refused() -> None:
    with pytest.raises(PlanError, match="makes other calls for a shorter sequence"):
        flow_of(Between(lambda _, x: x.relu() if x.shape[1] > 8 else x.relu().relu()))


def test_a_decoder_has_an_attention_per_block() -> None:
    flow = flow_of(Decoder(3))
    assert len(flow.attentions) == 3
    assert len(flow.positions) == 1
