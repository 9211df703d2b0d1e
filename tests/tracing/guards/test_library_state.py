"""Guards on what objects of Python's library hold: bytes, members of weak containers, what a weak reference leads to."""

from __future__ import annotations

import array
import ctypes
import threading
import weakref
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.recorded_reads import guards_of


class Net(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.held, self.read = nn.Linear(2, 2), held, read

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * float(self.read(self.held))


class Owner:
    def __init__(self, scale: float) -> None:
        self.scale = scale


OWNER, OTHER, TABLE = Owner(1.0), Owner(2.0), {"k": 1.0}
BYTES = bytearray(b"\x01\x02")


def _first(value: Any) -> Any:
    return value[0]


CASES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytearray": (bytearray(b"\x01"), _first, lambda held: held.__setitem__(0, 2)),
    "bytearray that grows": (bytearray(b"\x01"), len, lambda held: held.append(2)),
    "memoryview": (memoryview(BYTES), _first, lambda _: BYTES.__setitem__(0, 7)),
    "array": (array.array("d", [1.0]), _first, lambda held: held.__setitem__(0, 2.0)),
    "ctypes": (ctypes.c_int(1), lambda held: held.value, lambda held: setattr(held, "value", 2)),
    "weak set": (weakref.WeakSet([OWNER]), len, lambda held: held.add(OTHER)),
    "weak values": (
        weakref.WeakValueDictionary({"k": OWNER}),
        lambda held: held["k"].scale,
        lambda held: held.__setitem__("k", OTHER),
    ),
    "weak keys": (weakref.WeakKeyDictionary({OWNER: 1.0}), len, lambda held: held.__setitem__(OTHER, 1.0)),
    "view of a dict": (MappingProxyType(TABLE), lambda held: held["k"], lambda _: TABLE.__setitem__("k", 3.0)),
    "weak reference": (weakref.ref(OWNER), lambda held: held().scale, lambda held: setattr(held(), "scale", 5.0)),
    "weak proxy": (weakref.proxy(OWNER), lambda held: held.scale, lambda held: setattr(held, "scale", 6.0)),
    "event": (threading.Event(), lambda held: held.is_set(), lambda held: held.set()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_an_object_of_the_library_holds_is_guarded(name: str) -> None:
    held, read, change = CASES[name]
    guards = guards_of(Net(held, read), torch.zeros(3, 2))
    assert guards.hold()
    change(held)
    assert not guards.hold()
    assert guards.changes()


def test_guards_keep_no_member_of_a_weak_container_alive() -> None:
    owner = Owner(1.0)
    held = weakref.WeakSet([owner])
    guards = guards_of(Net(held, len), torch.zeros(3, 2))
    assert guards.hold()
    del owner
    assert len(held) == 0
    assert not guards.hold()


def test_guards_leave_a_buffer_free_to_grow() -> None:
    held = bytearray(b"\x01")
    guards = guards_of(Net(held, _first), torch.zeros(3, 2))
    held.extend(b"1234")
    assert not guards.hold()


def test_a_large_buffer_is_a_risk() -> None:
    guards = guards_of(Net(bytearray(1 << 21), len), torch.zeros(3, 2))
    assert any("large bytearray" in reason for reason in guards.risks.values())
