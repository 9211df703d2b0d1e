"""Signatures: calls that one recording serves have equal ones, and all others do not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.microbatches import MiniBatch, sizes
from pipecompile.driver.signature import Signature, signature_of, training_modes
from pipecompile.errors import InputError


class OfAClass(torch.Tensor):
    """A tensor on whose class a forward may branch."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.again = self.inner[0]

    def forward(self, x: Any, flag: Any = None, texts: Any = None) -> Any: ...


MODEL = Model()
X = torch.zeros(4, 3)


def signature(*args: Any, count: int = 2, batch_dims: Any = None, **kwargs: Any) -> Signature:
    inputs = flatten(MODEL.forward, args, kwargs, batch_dims or {})
    return signature_of(MODEL, MiniBatch(inputs, sizes(inputs.samples, count) if inputs.samples else (1,)))


def test_sizes_of_the_batch_do_not_count() -> None:
    assert signature(X) == signature(torch.ones(7, 3)) == signature(torch.ones(1, 3), count=1)
    along_one = {"batch_dims": {"x": 1}}
    assert signature(X, **along_one) == signature(torch.zeros(4, 9), **along_one) != signature(X)


@pytest.mark.parametrize(
    "other",
    [
        {"args": (torch.zeros(4, 5),)},
        {"args": (torch.zeros(4, 3, 1),)},
        {"args": (X.double(),)},
        {"args": (X.clone().requires_grad_(),)},
        {"args": (X.as_subclass(OfAClass),)},
        {"args": (X, 1)},
        {"args": ((X, X),)},
        {"kwargs": {"x": X}},
        {"batch_dims": {"x": None}},
    ],
    ids=str,
)
def test_shapes_dtypes_gradients_structure_and_plain_values_count(other: dict[str, Any]) -> None:
    kwargs = other.get("kwargs", {})
    args = other.get("args", () if kwargs else (X,))
    assert signature(*args, batch_dims=other.get("batch_dims"), **kwargs) != signature(X)


def test_equal_numbers_of_other_types_are_other_values() -> None:
    assert len({signature(X, flag) for flag in (1, 1.0, True, 2)}) == 4
    assert signature(X, 1) == signature(X, 1)


def test_modes_and_autocast_count() -> None:
    usual = signature(X)
    MODEL.inner[1].eval()
    try:
        assert signature(X) != usual
    finally:
        MODEL.train()
    with torch.autocast("cpu", torch.bfloat16):
        assert signature(X) != usual
    assert signature(X) == usual


def test_the_default_dtype_counts() -> None:
    x, before = torch.zeros(4, 3), torch.get_default_dtype()
    known = signature(x)
    try:
        torch.set_default_dtype(torch.float64)
        assert signature(x) != known
    finally:
        torch.set_default_dtype(before)


def test_modes_are_breadth_first_and_a_shared_module_counts_once() -> None:
    model = Model()
    model.inner.training = False
    assert training_modes(model) == (True, False, True, True)  # the model, inner, again, dropout
    model.inner[1] = None  # type: ignore[assignment]
    assert training_modes(model) == (True, False, True)


def test_arrays_of_other_libraries_are_refused_and_their_numbers_are_not() -> None:
    with pytest.raises(InputError, match=r"an input is a numpy\.ndarray") as caught:
        signature(X, np.zeros(4))
    assert caught.value.hint == "torch.from_numpy(...)"
    assert signature(X, np.float64(1)) == signature(X, np.float64(1))


def test_entries_of_lists_must_be_alike_in_all_micro_batches() -> None:
    listed: dict[str, Any] = {"batch_dims": {"texts": list}}
    alike, other = torch.zeros(2), torch.zeros(5)
    assert signature(X, texts=[alike] * 4, **listed) == signature(
        torch.zeros(2, 3), texts=[alike] * 2, count=1, **listed
    )
    with pytest.raises(InputError, match="lists with an entry per sample differ in shape") as caught:
        signature(X, texts=[alike, alike, alike, other], **listed)
    assert "texts" in caught.value.where
    assert caught.value.hint.endswith("n_microbatches=1")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1) -> torch.Tensor:
        return self.a(x.to(self.a.weight.dtype)) + (x * scale).abs()


def test_dtypes_and_kinds_of_numbers_are_kinds_of_calls() -> None:
    model = Scaled().eval()
    pipe = pc.compile(model, 1, devices=["cpu"], cost="analytic")
    tensors = (torch.ones(4, 3), torch.ones(4, 3).double(), torch.ones(4, 3, dtype=torch.int64))
    for x, scale in itertools.product(tensors[::2], (1, 1.0, True, 2)):
        torch.testing.assert_close(pipe(x, scale), model(x, scale))
    assert pipe.explain().traces == 8
