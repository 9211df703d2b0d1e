"""What arrives in a step: tensors once each, other values in the signature."""

from __future__ import annotations

from typing import Any

import torch

from pipecompile.runtime.cuda_graphs.static_arrivals import Arrivals


def arrivals(**others: Any) -> dict[tuple[str, bool], Any]:
    shared = torch.ones(2)
    return {("x", False): [shared, shared], ("t", False): [{"a": torch.zeros(1), "n": 3}, None]} | {
        (name, False): value for name, value in others.items()
    }


def test_a_tensor_that_arrives_twice_is_one() -> None:
    given = Arrivals.of(arrivals())
    assert given.places == (0, 0, 1, None, None)
    assert len(given.tensors) == 2
    one, two = torch.full((2,), 7.0), torch.full((1,), 8.0)
    filled = given.filled([one, two])
    assert filled["x", False][0] is filled["x", False][1] is one
    assert filled["t", False] == [{"a": two, "n": 3}, None]


def test_the_signature_has_shapes_and_numbers_and_no_values() -> None:
    same, other = arrivals(), arrivals()
    other["x", False] = [torch.full((2,), 5.0)] * 2
    assert Arrivals.of(same).signature == Arrivals.of(other).signature
    for key, value in (
        ("x", [torch.ones(3)] * 2),
        ("x", [torch.ones(2), torch.ones(2)]),
        ("t", [{"a": torch.zeros(1), "n": 4}, None]),
    ):
        assert Arrivals.of(same).signature != Arrivals.of(arrivals() | {(key, False): value}).signature


def test_what_a_graph_cannot_take() -> None:
    assert Arrivals.of(arrivals()).unfit == ""
    assert Arrivals.of(arrivals(o=[object()])).unfit == "object"
    assert Arrivals.of(arrivals(o=[torch.eye(2).to_sparse()])).unfit == "Tensor"
