"""State that a forward writes and no node can: each kind is left as the model leaves it, or warned of."""

from __future__ import annotations

import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Totals:
    count = 0


COUNT, NAMESPACE, SLOTTED, TENSOR = 0, SimpleNamespace(count=0), Slotted(), torch.zeros(())


def count_globally() -> None:
    global COUNT  # noqa: PLW0603 the state that the test is about
    COUNT += 1


def counter() -> Any:
    count = 0

    def increase() -> int:
        nonlocal count
        count += 1
        return count

    return increase


INCREASE = counter()


def by_function(_: Any) -> None:
    by_function.count += 1  # type: ignore[attr-defined]


def by_global(_: Any) -> None:
    count_globally()


def by_namespace(_: Any) -> None:
    NAMESPACE.count += 1


def by_slot(_: Any) -> None:
    SLOTTED.count += 1


def by_class(_: Any) -> None:
    Totals.count += 1


def by_closure(_: Any) -> None:
    INCREASE()


def by_missing_key(model: Any) -> None:
    model.counts["seen"] += 1


def by_text(model: Any) -> None:
    model.text += "x"


def by_layer(model: Any) -> None:
    model.last.seen = getattr(model.last, "seen", 0) + 1


def by_removal(model: Any) -> None:
    vars(model).pop("once", None)


class Writes(nn.Module):
    def __init__(self, write: Any) -> None:
        super().__init__()
        self.first, self.last, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        self.counts, self.text, self.once = Counter[str](), "", True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return self.last(self.first(x))


BESIDE_THE_MODEL = [by_function, by_global, by_namespace, by_slot, by_class, by_closure]
ON_THE_MODEL = [by_text, by_removal]
COUNTED = [by_missing_key, by_layer]


@pytest.mark.parametrize("write", BESIDE_THE_MODEL)
def test_a_write_that_no_node_makes_is_warned_of_once(write: Any) -> None:
    by_function.count = 0  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pc.compile(Writes(write), 2, example_args=(torch.ones(4, 4),), n_microbatches=2, cost="analytic", devices=["cpu"] * 2,
                          loss_fn=lambda y: y.square().mean())  # fmt: skip
        for _ in range(3):
            pipe.step(torch.randn(4, 4))
    texts = [str(one.message) for one in caught if issubclass(one.category, pc.RecordingWarning)]
    assert len([text for text in texts if "Writes.forward changes" in text]) == 1


@pytest.mark.parametrize("write", COUNTED)
def test_a_count_that_the_first_call_begins_is_that_of_all_micro_batches(write: Any) -> None:
    model = Writes(write)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.RecordingWarning)
        pipe = pc.compile(model, 2, example_args=(torch.ones(4, 4),), n_microbatches=2, cost="analytic", devices=["cpu"] * 2,
                          loss_fn=lambda y: y.square().mean())  # fmt: skip
        for _ in range(3):
            pipe.step(torch.randn(4, 4))
    assert model.counts["seen"] + getattr(model.last, "seen", 0) == 6


@pytest.mark.parametrize("write", ON_THE_MODEL)
def test_state_of_the_model_that_a_node_would_make_otherwise_is_warned_of(write: Any) -> None:
    """A node put the value of the recording there in every run."""
    with pytest.warns(pc.RecordingWarning, match="Writes.forward changes"):
        pc.trace(Writes(write), torch.ones(4, 4))


def test_a_global_tensor_has_what_the_steps_wrote_alone() -> None:
    class Sums(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            TENSOR.add_(1)
            return super().forward(x)

    TENSOR.zero_()
    model = nn.Sequential(Sums(4, 4), nn.Linear(4, 4))
    pipe = pc.compile(model, 2, example_args=(torch.ones(4, 4),), n_microbatches=2, cost="analytic", devices=["cpu"] * 2,
                      loss_fn=lambda y: y.square().mean())  # fmt: skip
    for _ in range(3):
        pipe.step(torch.randn(4, 4))
    assert float(TENSOR) == 6
