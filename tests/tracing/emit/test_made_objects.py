"""Copies of objects around a function: what can change is shared by all functions copied with one memo, cycles included."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing.emit.made_objects import (
    Copies,
    assigned_variables,
    empty_copy,
    is_of_call,
    is_state,
    parts_of,
)


def around(*roots: Any) -> dict[int, Any]:
    """Return everything around some objects, by id."""
    found, pending = dict[int, Any](), [*roots]
    while pending:
        value = pending.pop()
        if id(value) not in found and not is_of_call(value):
            found[id(value)] = value
            pending += parts_of(value)
    return found


def copied(*roots: Any, leaves: dict[int, Any] | None = None, memo: dict[int, Any] | None = None) -> list[Any]:
    copies = Copies(around(*roots), set(), {} if memo is None else memo, leaves or {})
    return [copies.of(root) for root in roots]


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = [0]


@pytest.mark.parametrize(
    "value",
    [[1], {"a": [1]}, {1}, deque([1], maxlen=3), defaultdict(list, a=[1]), OrderedDict(a=1), bytearray(b"1"), SimpleNamespace(a=[1]),
     ([1], 2), torch.Generator()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_copy_is_equal_and_another_object(value: Any) -> None:
    (copy,) = copied(value)
    assert copy is not value
    assert type(copy) is type(value)
    if not isinstance(value, torch.Generator):
        assert copy == value
    assert getattr(copy, "maxlen", None) == getattr(value, "maxlen", None)


def test_functions_partials_and_methods_share_what_they_hold() -> None:
    seen: list[int] = []
    counter, slotted = itertools.count(), Slotted()

    class Notes:
        def __init__(self) -> None:
            self.own, self.back = seen, self

        def note(self, value: int) -> None:
            self.back.own.append(value)

    def add(value: int, default: Any = slotted, *, keyword: Any = seen) -> int:
        keyword.append(value)
        default.n.append(next(counter))
        return len(seen)

    hooks = copied(add, Notes().note, partial(add, keyword=seen), seen.append)
    for hook in hooks:
        hook(3)
    assert hooks[0](4) == 5
    assert (seen, slotted.n, next(counter)) == ([], [0], 0)


def test_a_function_in_its_own_variables_has_its_attributes() -> None:
    def hook() -> int:
        hook.n += 1  # type: ignore[attr-defined]
        return hook.n  # type: ignore[attr-defined]

    hook.n = 0  # type: ignore[attr-defined]
    memo: dict[int, Any] = {}
    (one,), (two,), (other,) = copied(hook, memo=memo), copied(hook, memo=memo), copied(hook)
    assert (one(), two(), other(), hook.n) == (1, 2, 1, 0)  # type: ignore[attr-defined]


def test_tensors_of_the_call_are_exchanged_and_others_stay() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    own = torch.zeros(2)
    assert is_of_call(fake)
    assert not is_of_call(own)
    ((one, (two,)),) = copied((fake, [own]), leaves={id(fake): 5})
    assert (one, two) == (5, own)


def test_what_can_change_is_state() -> None:
    def assigns() -> None:
        nonlocal n
        n += 1

    n = 0
    assert assigned_variables(assigns.__code__) == {"n"}
    assert [is_state(one) for one in ([], {}, SimpleNamespace(), iter([]))] == [True] * 4
    assert [is_state(one) for one in (1, "a", (), assigns, partial(assigns), [].append, threading.Lock())] == [
        False
    ] * 7

    class Local:
        shared = 1

        def __init__(self) -> None:
            super().__init__()

    class Reading:
        def read(self) -> int:
            return n

    assert [is_state(one) for one in (Local, Reading, Slotted)] == [True, True, False]
    assert parts_of(Local()) == []
    assert parts_of(Reading()) == [Reading]
    for one in (Local, Reading):
        with pytest.raises(TypeError):
            empty_copy(one)
    with pytest.raises(TypeError):
        empty_copy(one for one in ())
