"""The inputs of a list of micro-batches: by name in the program, one column per micro-batch."""

from __future__ import annotations

from typing import Any

import torch

from pipecompile.batching.call_inputs import FlatInputs, flatten
from pipecompile.runtime.listed_call import ListedPorts
from pipecompile.runtime.registers import Frame


def forward(x: torch.Tensor, y: torch.Tensor) -> None: ...


def call(*tensors: Any) -> FlatInputs:
    return flatten(forward, tensors, {})


def name_of(number: int, value: str) -> str:
    return f"{value}~{number}" if (number, value) == (2, "y") else value


def test_values_of_other_recordings_are_none() -> None:
    x, y = torch.zeros(2, requires_grad=True), torch.ones(2)
    ports = ListedPorts((1, 2), [("x", "y")] * 2, name_of, (call(x, y), call(y, x)))
    arrivals = ports.arrivals([one.leaves for one in ports.calls])
    assert {key: [value is not None for value in column] for key, column in arrivals.items()} == {
        ("x", False): [True, True], ("y", False): [True, False], ("y~2", False): [False, True],
    }  # fmt: skip


def test_gradients_of_a_tensor_in_two_micro_batches_add_up() -> None:
    x, y = torch.zeros(2, requires_grad=True), torch.ones(2)
    ports = ListedPorts((1, 2), [("x", "y")] * 2, name_of, (call(x, y), call(y, x)))
    frame = Frame([], [])
    frame.departures = {("x", True): [{0: y, 1: y}, {}], ("y~2", True): [{}, {1: 3 * y}]}
    ports.return_gradients(frame)
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
