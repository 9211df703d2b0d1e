from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from pipecompile.distributed.messages.message_layout import (
    HEADER_LENGTH,
    MessageLayout,
    PayloadKind,
    as_bytes,
    encode,
    name_checksum,
)
from pipecompile.errors import PlanError


def sent(value: Any) -> Any:
    """The value as it arrives on another rank: header and payload are copied."""
    layout, payload = encode(value)
    header = layout.to_header()
    assert len(header) == HEADER_LENGTH
    read = MessageLayout.from_header(header)
    assert read == layout
    if payload is None or not read.nbytes:
        return read.decode(read.allocate())
    content = read.allocate()
    as_bytes(content).copy_(as_bytes(payload))
    return read.decode(content)


TENSORS = {
    "matrix": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with holes": torch.randn(6, 6)[::2, 1:4],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(5).bfloat16(),
    "ten dimensions": torch.randn(1, 2, 1, 2, 1, 2, 1, 2, 1, 2),
    "eleven dimensions": torch.randn(1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_values(name: str) -> None:
    tensor = TENSORS[name]
    arrived = sent(tensor)
    assert arrived.dtype == tensor.dtype
    assert torch.equal(arrived, tensor.resolve_conj())


@pytest.mark.parametrize("name", ["matrix", "transposed", "channels last", "scalar"])
def test_a_dense_tensor_arrives_with_its_strides(name: str) -> None:
    assert sent(TENSORS[name]).stride() == TENSORS[name].stride()


def test_holes_are_not_sent() -> None:
    layout, payload = encode(TENSORS["with holes"])
    assert layout.nbytes == 9 * 4
    assert payload is not None
    assert payload.is_contiguous()


@pytest.mark.parametrize("value", [None, 3, "text", [1, torch.ones(2)], {"a": (1, 2)}])
def test_other_values_arrive_equal(value: Any) -> None:
    assert str(sent(value)) == str(value)


def test_a_tensor_arrives_as_a_leaf_that_requires_grad() -> None:
    made = torch.randn(3, requires_grad=True) * 2
    arrived = sent(made)
    assert arrived.requires_grad
    assert arrived.is_leaf
    assert not sent(made.detach()).requires_grad


class Marked(torch.Tensor):
    """A kind of tensor that no header describes."""


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "subclass": lambda x: x.as_subclass(Marked),
    "sparse": torch.Tensor.to_sparse,
    "eleven dimensions": lambda x: x.reshape(-1, *[1] * 10),
    "under way": lambda x: AsyncCollectiveTensor(x.detach()).requires_grad_(x.requires_grad),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_required", [True, False])
def test_a_tensor_of_any_kind_keeps_whether_it_requires_grad(kind: str, is_required: bool) -> None:
    """Also one in a container. Else the receiver returns None for the gradient of the sender."""
    made = KINDS[kind](torch.ones(3, 2, requires_grad=is_required))
    for arrived in (sent(made), sent([1, {"a": made}])[1]["a"]):
        assert (arrived.requires_grad, arrived.is_leaf) == (is_required, True)
        assert torch.equal(arrived.to_dense().reshape(3, 2), torch.ones(3, 2))


def test_the_result_of_a_collective_is_awaited_and_sent_as_a_plain_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_arrived(self: AsyncCollectiveTensor) -> torch.Tensor:
        return self.elem.mul_(3)

    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", sum_arrived)
    layout, payload = encode(AsyncCollectiveTensor(torch.ones(3)).requires_grad_())
    assert layout == encode(torch.ones(3, requires_grad=True))[0]
    assert payload is not None
    assert payload.tolist() == [3.0, 3.0, 3.0]


def test_a_value_that_cannot_be_pickled_is_refused_with_its_type() -> None:
    with pytest.raises(PlanError, match="a value of type function cannot go to another rank"):
        encode(lambda: 0)


def test_a_dense_tensor_is_sent_from_its_own_memory() -> None:
    tensor = torch.randn(4, 2).t()
    _, payload = encode(tensor)
    assert payload is not None
    assert payload.data_ptr() == tensor.data_ptr()
    assert as_bytes(payload).data_ptr() == tensor.data_ptr()
    assert as_bytes(payload).shape == (tensor.nbytes,)


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(3, 5),
        torch.randn(4, 3).t(),
        torch.randn(3, 4).double(),
        torch.randn(3, 4, requires_grad=True),
        torch.randn(3, 4, dtype=torch.complex64).conj(),
        torch.randn(3, 4).to_sparse(),
        None,
        "text",
    ],
)
def test_a_layout_fits_only_values_of_the_same_layout(other: Any) -> None:
    layout, _ = encode(torch.randn(3, 4))
    assert layout.fits(torch.randn(3, 4))
    assert layout.fits(nn.Parameter(torch.randn(3, 4), requires_grad=False))
    assert not layout.fits(other)


def test_the_layout_of_none_fits_only_none() -> None:
    layout, payload = encode(None)
    assert layout.kind is PayloadKind.NOTHING
    assert payload is None
    assert layout.fits(None)
    assert not layout.fits(0)


def test_checksums_of_names_differ() -> None:
    names = [f"{value}#{m}" for value in ("h", "h'1", "loss") for m in range(50)]
    assert len({name_checksum(name) for name in names}) == len(names)


def test_a_dtensor_is_refused() -> None:
    """Torch pickles it with the mesh of the sender, in which the receiver found no process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)))
        with pytest.raises(PlanError, match="a DTensor cannot go to another rank"):
            encode([made])
    finally:
        dist.destroy_process_group()
