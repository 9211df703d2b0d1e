from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pipecompile as pc
from pipecompile.distributed.agreement.state_texts import attributes, fixed_keys, key_of, live_keys, text_of

_SOURCE = """
from pipecompile.distributed.agreement.state_texts import key_of
def f(x): return x in {"a", "b", "c", "d"}
print(key_of(f), key_of({1: 2}.get), key_of((dict, ("b", "a"))))
"""


def _first(x: Any) -> Any:
    return x + 1


def _second(x: Any) -> Any:
    return x + 2


def test_keys_are_equal_in_two_processes() -> None:
    """Sets of texts have another order in each process."""
    said = {subprocess.run([sys.executable, "-c", _SOURCE], capture_output=True, check=True).stdout for _ in range(3)}
    assert len(said) == 1
    assert said != {b""}


def test_code_counts_by_what_it_does() -> None:
    same: Callable[[Any], Any] = lambda x: x + 1  # noqa: E731
    assert key_of(_first) == key_of(_first.__code__) == key_of(same)
    assert key_of(_first) != key_of(_second)
    assert text_of(_first).startswith("_first (test_state_texts.py:")


def test_values_count_by_content_and_objects_by_class() -> None:
    assert key_of(1.0) != key_of(1)
    assert key_of("a") == key_of("a")
    assert key_of(object()) == key_of(object())
    assert key_of((list, (0, 1))) == "list of 2"


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.shift = nn.Linear(4, 4), 2.0, torch.ones(4)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * self.scale + self.shift * self.mask


def test_a_tensor_that_is_no_weight_is_read_at_every_run() -> None:
    model = _Shifted()
    pipe = pc.compile(model, 1, example_args=(torch.randn(8, 4),), loss_fn=nn.functional.mse_loss)
    guards = pipe._cache.latest.guards
    assert guards is not None
    tensors = attributes(guards.state, model.buffers())
    before = live_keys(tensors, {})
    assert [*before] == ["model.shift"]
    assert fixed_keys(guards.state)["model.scale"] == "2.0"
    model.shift += 1
    assert live_keys(tensors, {}) != before


KINDS = {"a", "b", "c", "d", "e"}


class _Listed(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * len([kind for kind in KINDS if kind != "a"])


def test_the_order_of_a_set_has_no_keys() -> None:
    """Two copies would differ by it, in a model of transformers by 164 labels."""
    pipe = pc.compile(_Listed(), 1, example_args=(torch.randn(8, 4),))
    guards = pipe._cache.latest.guards
    assert guards is not None
    keys = fixed_keys(guards.state)
    name = next(label for label in keys if label.startswith("KINDS"))
    assert keys[name] == "set of 5"
    assert [label for label in keys if label.startswith(f"{name}[")] == []
    assert any(label.startswith(f"{name}[") for label in guards.state.values)
    assert [value for value in keys.values() if "the same as" in value] == []
