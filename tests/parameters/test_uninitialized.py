from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.parameters.uninitialized import UninitializedTensors, temporary_memory, tensor_names

CPU = torch.device("cpu")


class Held(nn.Module):
    """Tensors of every kind and of many types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(3, 3, dtype=torch.bfloat16), nn.LSTM(3, 3)
        self.complex = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("flag", torch.ones((), dtype=torch.bool))
        self.register_buffer("index", torch.ones(3, dtype=torch.int64), persistent=False)
        self.stretched = torch.ones(3, 1, dtype=torch.float8_e4m3fn).expand(3, 4)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self.buffers(), self.stretched]


def on_meta() -> Held:
    with torch.device("meta"):
        return Held()


def test_what_gets_memory_stays_the_same_object_and_is_blank_until_it_is_written() -> None:
    model, uninitialized = on_meta(), UninitializedTensors()
    before = [(id(t), t.shape, t.dtype, t.requires_grad, type(t)) for t in model.tensors]
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=1.0)
    for tensor in model.tensors:
        uninitialized.add(tensor, CPU)
    assert before == [(id(t), t.shape, t.dtype, t.requires_grad, type(t)) for t in model.tensors]
    assert {t.device for t in model.tensors} == {CPU}
    assert {id(t) for t in uninitialized.remaining()} == {id(t) for t in model.tensors}
    for tensor in model.tensors:
        tensor.data.zero_()  # leaves no trace but the zeros
        assert id(tensor) not in {id(t) for t in uninitialized.remaining()}
        assert tensor not in uninitialized
    model.lstm(torch.randn(2, 3))
    model.linear(torch.randn(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert model.linear.weight.any()


def test_an_integer_may_well_be_minus_one() -> None:
    with torch.device("meta"):
        last, unknown = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    uninitialized = UninitializedTensors()
    for tensor in (last, unknown):
        uninitialized.add(tensor, CPU)
    last.fill_(-1)
    unknown.fill_(float("nan"))
    assert uninitialized.remaining() == []


def test_names_say_what_a_checkpoint_does_not_have() -> None:
    model = on_meta()
    assert tensor_names(model, [model.linear.bias, model.index, model.stretched, torch.ones(1)]) == [
        "index (a buffer outside state_dict)", "stretched (an attribute)", "linear.bias", "a tensor",
    ]  # fmt: skip


def test_memory_that_is_lent_is_taken_back() -> None:
    model = on_meta()
    with temporary_memory(model.linear.parameters()):
        assert not model.linear.weight.is_meta
        nn.init.ones_(model.linear.weight)
    assert model.linear.weight.is_meta
    assert model.linear.weight.requires_grad
    assert next(iter(model.linear.parameters())) is model.linear.weight


def test_wrapped_tensors_are_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with torch.device("meta"):
        wrapped = TwoTensor(torch.ones(2), torch.ones(2))
    with pytest.raises(pc.InputError, match="a TwoTensor is on meta"):
        UninitializedTensors().add(wrapped, CPU)
