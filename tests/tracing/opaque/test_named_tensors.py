"""The tensors that code names, and those that it does not."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.named_tensors import named_by, named_tensors, tensors_within


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2))
        self.register_buffer("other", torch.zeros(2))

    def add(self, h: torch.Tensor) -> None:
        self.rows.add_(h)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.other


def decorated(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("top", torch.zeros(2))
        self.plain = torch.zeros(2)
        self.stats = {"n": [torch.zeros(2)]}
        self.weight = nn.Parameter(torch.zeros(2))
        self.table, self.norm = Table(), nn.BatchNorm1d(2)
        self.layers = nn.ModuleList(Table() for _ in range(2))

    def one(self, h: torch.Tensor) -> None:
        if h.sum() > 100:
            self.mean.add_(1)

    @decorated
    def wrapped(self, h: torch.Tensor) -> None:
        self.one(h)

    @property
    def peak(self) -> torch.Tensor:
        return self.top

    def of_property(self) -> None:
        self.peak.add_(1)

    def of_table(self, h: torch.Tensor) -> None:
        self.table.add(h)

    def calls(self, h: torch.Tensor) -> torch.Tensor:
        return self.table(h)

    def of_norm(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(h)

    def attributes(self) -> None:
        self.plain += 1
        self.stats["n"][0] += 1

    def by_text(self) -> None:
        getattr(self, "mean").add_(1)  # noqa: B009

    def in_a_loop(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h)
        return h * self.weight

    def nothing(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.weight


def plain_function(model: Model) -> None:
    model.top.add_(1)


def named(model: Model, piece: Piece, *arguments: Any) -> set[str]:
    """Return the names of the tensors that a piece names, with "=" before those that it only reads."""
    names = {id(tensor): name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    names |= {id(model.plain): "plain", id(model.stats["n"][0]): "n"}
    return {"=" * is_read + names[id(tensor)] for tensor, is_read in named_by(piece, model, None, arguments)}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("one", {"mean"}),
        ("wrapped", {"mean"}),
        ("of_property", {"top"}),
        ("of_table", {"table.rows", "=table.other"}),
        ("calls", {"=table.other"}),
        ("of_norm", {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}),
        ("attributes", {"plain", "n"}),
        ("by_text", {"mean"}),
        ("in_a_loop", set()),
        ("nothing", set()),
    ],
)
def test_a_method(method: str, expected: set[str]) -> None:
    assert named(Model(), Piece("", method)) == expected


def test_a_plain_function_names_attributes_of_the_modules_that_it_gets() -> None:
    model, piece = Model(), Piece("", "plain_function", function=f"{__name__}:plain_function")
    assert named(model, piece, model) == {"top"}
    assert named(model, piece) == set()


def test_texts_count_as_names() -> None:
    model = Model()
    ((found, is_read),) = named_tensors([model], [Model.nothing.__code__], frozenset({"top"}))
    assert found is model.top
    assert not is_read


def test_a_module_has_its_own_buffers() -> None:
    assert not named(Model(), Piece("table"))


def test_tensors_within_containers_and_objects() -> None:
    one, other = torch.zeros(1), torch.zeros(2)
    holder: list[Any] = [one, "text", {"k": (other, 3, None)}, nn.Linear(1, 1)]
    holder.append(holder)
    assert {id(tensor) for tensor in tensors_within(holder)} == {id(one), id(other)}

    class Own:
        def __init__(self) -> None:
            self.value = one

    assert [*tensors_within(Own())] == [one]
    assert not [*tensors_within(SimpleNamespace)]
