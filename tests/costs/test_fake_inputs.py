from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pipecompile.costs.fake_inputs import FakeTwins, OneDevice

CPU = torch.device("cpu")


@pytest.mark.parametrize("home", ["cpu", "meta"])
def test_every_tensor_of_a_model_gets_one_twin(home: str) -> None:
    with torch.device(home):
        model = nn.ModuleDict(
            {"lstm": nn.LSTM(4, 4), "norm": nn.BatchNorm1d(4), "one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
        )
        model["two"].weight = model["one"].weight
        model["norm"].constant = torch.ones(2, 2).t()
    with FakeTensorMode():
        FakeTwins(CPU).replace_in(model)
    tensors = [*model.parameters(), *model.buffers(), model["norm"].constant]
    assert all(isinstance(tensor, FakeTensor) and tensor.device == CPU for tensor in tensors)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert model["two"].weight is model["one"].weight
    lstm: Any = model["lstm"]
    assert all(
        flat is lstm.get_parameter(name)
        for flat, name in zip(lstm._flat_weights, lstm._flat_weights_names, strict=True)
    )
    assert model["norm"].constant.stride() == (1, 2)


def test_twins_keep_whether_a_gradient_is_wanted() -> None:
    with FakeTensorMode():
        twins = FakeTwins(CPU)
        wanted = [twins.of(tensor).requires_grad for tensor in (torch.ones(1), torch.ones(1, requires_grad=True))]
        frozen = twins.of(nn.Parameter(torch.ones(1), requires_grad=False))
    assert (wanted, frozen.requires_grad) == ([False, True], False)


def test_calls_that_name_a_device_get_the_common_one() -> None:
    with OneDevice(CPU):
        made = [
            torch.zeros(2, device="meta"),
            torch.ones(2).to("meta"),
            torch.ones(2).to(torch.device("meta"), torch.float64),
            torch.ones(2).to(device="meta"),
            torch.ones(2).cuda(),
        ]
        typed = torch.ones(2).to(torch.int8)
    assert {tensor.device for tensor in made} == {CPU}
    assert (made[2].dtype, typed.dtype) == (torch.float64, torch.int8)
