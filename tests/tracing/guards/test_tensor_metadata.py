"""Changes of a tensor that a recording notices, and those that it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipecompile.tracing.guards.tensor_metadata import TensorMetadata


def of(tensor: torch.Tensor) -> TensorMetadata:
    return TensorMetadata([("w", tensor)])


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "requires_grad": lambda w: w.requires_grad_(False),
    "shape": lambda w: setattr(w, "data", w.data[:2]),
    "dtype": lambda w: setattr(w, "data", w.data.half()),
    "strides": lambda w: setattr(w, "data", w.data.t().contiguous().t()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str) -> None:
    w = nn.Parameter(torch.randn(4, 4))
    metadata = of(w)
    assert metadata.holds()
    CHANGES[name](w)
    assert not metadata.holds()
    assert name in [change[1] for change in metadata.changes()]


def test_writes_and_new_memory_of_the_same_kind_are_no_change() -> None:
    w = nn.Parameter(torch.randn(4, 4))
    metadata = of(w)
    with torch.no_grad():
        w.add_(1)
    w.grad = torch.ones(4, 4)
    assert metadata.holds()
    w.data = w.data - 0.1
    assert metadata.holds()
    assert metadata.changes() == []


def test_sparse_and_meta_tensors_have_metadata() -> None:
    assert of(torch.eye(3).to_sparse()).holds()
    assert of(torch.empty(3, device="meta")).holds()
