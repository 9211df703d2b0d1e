"""Whether a state is unchanged: lengths, identities, classes, metadata and the bytes of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipecompile.tracing.guards.read_state import ReadState
from pipecompile.tracing.guards.state_fetch import StateFetch, TensorMetadata


class Thing:
    pass


class Other:
    pass


def example() -> tuple[StateFetch, dict[str, Any], list[Any], Any, Any, torch.Tensor]:
    table, items, thing, array, tensor = {"a": 1.5, "b": 2}, [1, "x"], Thing(), np.zeros(3), torch.zeros(2)
    state = ReadState(sized=[items], typed=[thing], tensors=[("t", tensor)], arrays=[("n", array, array.tobytes())])
    state.add_names(table, ["a"])
    state.add_row(iter, items)
    return StateFetch(state), table, items, thing, array, tensor


def test_equal_values_in_new_objects_are_unchanged() -> None:
    fetch, table, *_ = example()
    assert fetch.is_unchanged()
    table.update(a=float("1.5"), b=99)
    assert fetch.is_unchanged()
    assert fetch.is_unchanged()
    assert not fetch.is_surely_changed()


CHANGES: tuple[Callable[..., Any], ...] = (
    lambda table, *_: table.update(a=1),
    lambda table, *_: table.pop("a"),
    lambda _table, items, *_: items.append(1),
    lambda _table, items, *_: items.__setitem__(0, 2),
    lambda _t, _i, thing, *_: setattr(thing, "__class__", Other),
    lambda _t, _i, _o, array, _x: array.__setitem__(0, 5),
    lambda _t, _i, _o, _a, tensor: tensor.requires_grad_(),
)


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_each_kind_of_change_is_seen(number: int) -> None:
    fetch, *parts = example()
    CHANGES[number](*parts)
    assert not fetch.is_unchanged()


def of(tensor: torch.Tensor) -> TensorMetadata:
    return TensorMetadata([("w", tensor)])


METADATA: dict[str, Callable[[torch.Tensor], object]] = {
    "requires_grad": lambda w: w.requires_grad_(False),
    "shape": lambda w: setattr(w, "data", w.data[:2]),
    "dtype": lambda w: setattr(w, "data", w.data.half()),
    "strides": lambda w: setattr(w, "data", w.data.t().contiguous().t()),
}


@pytest.mark.parametrize("name", METADATA)
def test_a_change_is_named(name: str) -> None:
    w = nn.Parameter(torch.randn(4, 4))
    metadata = of(w)
    assert metadata.holds()
    METADATA[name](w)
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
