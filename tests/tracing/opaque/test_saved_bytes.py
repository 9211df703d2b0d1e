"""The bytes that autograd saves, and that nothing of a call is kept alive by their count."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.tracing.opaque.saved_bytes import SavedBytes, memory_key


def _saved(layer: nn.Linear, x: torch.Tensor) -> tuple[SavedBytes, Any]:
    saved = SavedBytes(frozenset(map(memory_key, layer.parameters())))
    with saved_tensors_hooks(saved.note, lambda packed: packed):
        result = layer(x).relu() * x.sum()
    return saved, result


def test_each_memory_counts_once_and_that_of_the_model_does_not() -> None:
    saved, _ = _saved(nn.Linear(4, 4), torch.zeros(7, 4))
    assert sum(saved.sizes.values()) == 7 * 4 * 4 * 2 + 4  # x, the result of relu, the sum


def test_a_graph_that_is_dropped_is_freed() -> None:
    saved, result = _saved(nn.Linear(4, 4), torch.zeros(9, 4))
    del saved, result
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (9, 4)]
