"""The layout of a value that goes from one rank to another: the receiver needs it to allocate memory for the bytes.

    header     kind, requires_grad, dtype, number of dimensions, bytes, shape, strides      25 int64
    payload    the elements in the order in which they lie in memory

A dense tensor arrives with the strides it had on the sender, so that the same kernels run on it. An object is pickled with the
`requires_grad` of its tensors beside them: many kinds of tensors lose it, and the sender would then get no gradient.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor

from pipecompile.batching.containers import flatten_containers, with_tensors
from pipecompile.errors import PlanError
from pipecompile.torch_private.dtensors import waited

__all__ = ["HEADER_LENGTH", "MessageLayout", "PayloadKind", "as_bytes", "encode", "name_checksum"]

CPU = torch.device("cpu")

_MAX_DIMS = 10
"""Most dimensions of a tensor that is sent as such; a tensor of more is pickled."""

HEADER_LENGTH = 5 + 2 * _MAX_DIMS
"""Length of a header in int64 numbers."""

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


class PayloadKind(IntEnum):
    """Kind of a payload: none (the value is None), the elements of a tensor, or a pickled object."""

    NOTHING = 0
    TENSOR = 1
    OBJECT = 2


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Layout of a value; `nbytes` is the size of its payload in bytes."""

    kind: PayloadKind
    nbytes: int = 0
    requires_grad: bool = False
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def fits(self, value: Any, device: torch.device = CPU) -> bool:
        """Return whether `value` has exactly this layout and lies in the memory of `device` as it is to be sent."""
        if self.kind is PayloadKind.NOTHING:
            return value is None
        return (
            type(value) in _PLAIN_TYPES
            and value.dtype is self.dtype
            and value.shape == self.shape
            and value.stride() == self.strides
            and value.requires_grad is self.requires_grad
            and value.device == device
            and not value.is_conj()
            and not value.is_neg()
        )

    def allocate(self, device: torch.device = CPU) -> torch.Tensor:
        """Return an uninitialised tensor of this layout, to receive a payload into."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def to_header(self) -> list[int]:
        """Return the layout as `HEADER_LENGTH` integers."""
        padding = [0] * (_MAX_DIMS - len(self.shape))
        first = (int(self.kind), int(self.requires_grad), _DTYPE_NUMBERS[self.dtype], len(self.shape), self.nbytes)
        return [*first, *self.shape, *padding, *self.strides, *padding]

    @classmethod
    def from_header(cls, header: Sequence[int]) -> MessageLayout:
        """Return the layout that `to_header` wrote."""
        kind, requires_grad, dtype, dims, nbytes, *rest = header
        shape, strides = tuple(rest[:dims]), tuple(rest[_MAX_DIMS : _MAX_DIMS + dims])
        return cls(PayloadKind(kind), nbytes, bool(requires_grad), _DTYPES[dtype], shape, strides)

    def decode(self, payload: torch.Tensor | None) -> Any:
        """Return the value, given a tensor of this layout that has its payload."""
        if payload is None or self.kind is PayloadKind.NOTHING:
            return None
        if self.kind is PayloadKind.OBJECT:
            return _unpickled(payload)
        return payload.requires_grad_(self.requires_grad)


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def encode(value: Any, device: torch.device = CPU) -> tuple[MessageLayout, torch.Tensor | None]:
    """Return the layout of a value and a tensor with its payload, on `device`; that of an object is always on the CPU.

    The tensor shares the memory of the value if that lies dense on `device`. A value that is not a plain strided tensor is pickled, but
    the result of a collective under way is awaited.
    """
    if value is None:
        return MessageLayout(PayloadKind.NOTHING), None
    if not _is_plain(settled := waited(value)):
        payload = _pickled(value)
        return MessageLayout(PayloadKind.OBJECT, len(payload), shape=(len(payload),), strides=(1,)), payload
    plain = settled.detach().resolve_conj().resolve_neg().to(device)
    if not plain.permute(_memory_order(plain.stride())).is_contiguous():
        plain = plain.contiguous()
    shape, strides = tuple(plain.shape), plain.stride()
    return MessageLayout(PayloadKind.TENSOR, plain.nbytes, value.requires_grad, plain.dtype, shape, strides), plain


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as a uint8 tensor `(nbytes,)`, without a copy."""
    return tensor.permute(_memory_order(tensor.stride())).view(-1).view(torch.uint8)


def name_checksum(name: str) -> int:
    """Return the CRC-32 of the name of a value. Receivers compare it, so that ranks that are out of step are noticed."""
    return crc32(name.encode())


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return type(value) in _PLAIN_TYPES and value.dim() <= _MAX_DIMS and not value.is_quantized


def _pickled(value: Any) -> torch.Tensor:
    """Return the bytes of a value whose tensors are without their graph and on the CPU: the receiver has another accelerator.

    Raises PlanError for a value that cannot be pickled, and for a DTensor, whose mesh has other ranks than the receiver's.
    """
    if any(isinstance(tensor, DTensor) for tensor in _tensors_in(value)):
        raise PlanError(
            "a DTensor cannot go to another rank",
            why="its mesh is that of the ranks with its stage",
            hint="use_local_output=True with output_layouts=Replicate() for the layer that returns it; pipe.step takes such an output",
        )
    requires_grad = [tensor.requires_grad for tensor in _tensors_in(value)]
    content = with_tensors(value, lambda tensor: waited(tensor).detach().cpu())
    try:
        text = pickle.dumps((content, requires_grad))
    except Exception as error:
        raise PlanError(
            f"a value of type {type(value).__name__} cannot go to another rank",
            why=f"it cannot be pickled: {type(error).__name__}: {error}",
            hint="pin= or keep_together=, so that the value stays on one rank",
        ) from error
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _unpickled(payload: torch.Tensor) -> Any:
    """Return the value that `_pickled` wrote; its tensors are leaves of autograd."""
    value, requires_grad = pickle.loads(payload.numpy().tobytes())  # noqa: S301 it comes from a rank of this very program
    for tensor, is_required in zip(_tensors_in(value), requires_grad, strict=True):
        tensor.requires_grad_(is_required)
    return value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten_containers(value)[0] if isinstance(leaf, torch.Tensor)]


def _memory_order(strides: Sequence[int]) -> list[int]:
    """Return the dimensions in the order of memory, slowest first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])
