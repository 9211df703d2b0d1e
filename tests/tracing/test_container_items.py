"""The items of containers are read without calling the user's methods."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.container_items import attributes_in, items_in, keys_in, refill, values_in
from pipecompile.tracing.state.snapshot import places_of


class Lazy(OrderedDict[str, Any]):
    """A mapping that makes its values when they are asked for, as that of the configurations of transformers."""

    made = 0

    def _make(self, *_: Any) -> Any:
        type(self).made += 1
        return iter(())

    values = items = keys = __iter__ = _make  # type: ignore[assignment]

    def __len__(self) -> int:
        return int(self._make() is None)


class Backwards(list[int]):
    def __iter__(self) -> Iterator[int]:
        return reversed(self)


def test_stored_items_of_subclasses_and_of_built_in_containers() -> None:
    lazy = Lazy()
    OrderedDict.update(lazy, {"b": 1, "a": 2})
    lazy.move_to_end("b")
    assert list(keys_in(lazy)) == ["a", "b"]
    assert list(values_in(lazy)) == [2, 1]
    assert items_in(lazy) == [("a", 2), ("b", 1)]
    refill(lazy, [("c", 3)])
    assert items_in(lazy) == [("c", 3)]
    assert Lazy.made == 0
    assert items_in(Backwards([1, 2])) == [1, 2]
    for container in ([1, 2], deque([1, 2]), {1, 2}):
        refill(container, [5])
        assert items_in(container) == [5]
    with pytest.raises(TypeError, match="int is not a container"):
        values_in(3)


TABLE = Lazy()


def test_neither_recording_nor_guards_call_them() -> None:
    class Model(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 3), nn.Linear(3, 3))
            self.table = Lazy()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.table is not TABLE
            return super().forward(x)

    x, model = torch.ones(4, 3), Model()
    pipe = pc.compile(model, 2, example_args=(x,), cost="analytic", loss_fn=lambda y: y.sum())
    pipe.step(x)
    pipe.step(x)
    assert Lazy.made == 0
    OrderedDict.__setitem__(model.table, "c", 3)
    pipe.step(x)
    assert "table" in str(pipe.explain())
    assert Lazy.made == 0


class Looked:
    """Counts its attributes that are read, as a configuration of transformers does much in Python for each; `isinstance` reads the class."""

    reads = 0

    def __init__(self) -> None:
        self.cache = [1]

    def __getattribute__(self, name: str) -> Any:
        Looked.reads += name != "__class__"
        return super().__getattribute__(name)


def test_the_search_for_state_does_not_call_the_methods_that_read_attributes() -> None:
    model, config = nn.Linear(2, 2), Looked()
    model.config = config
    before = Looked.reads
    found = places_of(model, deep=True)
    assert Looked.reads == before
    assert any(place.container is attributes_in(config)["cache"] for place in found)
    assert attributes_in(1) is None
