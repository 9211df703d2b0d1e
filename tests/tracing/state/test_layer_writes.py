"""A recording names the tensors that calls of layers write, by themselves or by their hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

import pipecompile as pc


def _scale(layer: Any, _args: Any) -> None:
    layer.weight.data.mul_(0.9)


def _replace(layer: Any, _args: Any) -> None:
    layer.weight.data = layer.weight.data * 0.9


def _read(layer: Any, _args: Any) -> None:
    layer.weight.data.mul(0.9)


@pytest.mark.parametrize(
    ("hook", "names"),
    [(_scale, {"1.weight"}), (_replace, {"1.weight"}), (_read, set[str]())],
    ids=["scale", "replace", "read"],
)
def test_hooks(hook: Any, names: set[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_pre_hook(hook)
    assert pc.trace(model, torch.randn(2, 4)).facts.written == names


def test_a_hook_writes_a_tensor_of_another_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(lambda *_: (model[0].bias.data.mul_(0.9), None)[1])
    assert pc.trace(model, torch.randn(2, 4)).facts.written == {"0.bias"}


def test_layers() -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(4, 4)), orthogonal(nn.Linear(4, 4)))
    written = pc.trace(model, torch.randn(2, 4)).facts.written
    assert written == {f"0.parametrizations.weight.0.{name}" for name in ("_u", "_v")}
    assert pc.trace(model.eval(), torch.randn(2, 4)).facts.written == frozenset()
