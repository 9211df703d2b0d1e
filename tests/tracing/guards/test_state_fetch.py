"""Whether a state is unchanged: lengths, identities, classes, metadata and the bytes of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipecompile.tracing.guards.read_state import ReadState
from pipecompile.tracing.guards.state_fetch import StateFetch


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
