"""The tensors that code names beside something that writes tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipecompile.tracing.state.writing_code import writable_tensors


def _clamps(layer: Any) -> None:
    layer.weight.data.clamp_(0, 1)


def _clamps_all(layer: Any) -> None:
    for parameter in layer.parameters():
        parameter.data.clamp_(0, 1)


def _reads(layer: Any) -> Any:
    return layer.weight.clamp(0, 1)


def test_tensors_are_those_that_writing_code_names() -> None:
    layer, alone = nn.Linear(2, 2), torch.ones(2)
    tensors = [*layer.named_parameters("inner"), ("", alone)]

    def found(function: Any) -> set[int]:
        return {id(one) for one in writable_tensors([_reads, function], tensors)}

    assert found(_clamps) == {id(layer.weight), id(alone)}
    assert found(_clamps_all) == {id(layer.weight), id(layer.bias), id(alone)}
    assert found(_reads) == set()
