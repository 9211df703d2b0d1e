"""A value on its way between two ranks: what it is, and the bytes of it.

    header    kind, wants a gradient?, dtype, dimensions, bytes, shape, strides      25 numbers
    bytes     the elements as they lie in memory

A tensor arrives with the strides it had where it was made, if they leave no holes, so that the same kernels run on it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from zlib import crc32

import torch

__all__ = ["HEADER", "PayloadKind", "MessageLayout", "encoded", "name_checksum", "raw"]

_MOST = 10
HEADER = 5 + 2 * _MOST
"""The length of a header."""

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


class PayloadKind(IntEnum):
    """What the bytes are."""

    NOTHING = 0
    TENSOR = 1
    OBJECT = 2


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """What has to be known of a value to receive its bytes."""

    kind: PayloadKind
    nbytes: int = 0
    wants_gradient: bool = False
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def is_of(self, value: Any) -> bool:
        """Can this value be sent as it is by this layout?"""
        if self.kind is PayloadKind.NOTHING:
            return value is None
        return (
            type(value) in _PLAIN
            and value.dtype is self.dtype
            and value.shape == self.shape
            and value.stride() == self.strides
            and value.requires_grad is self.wants_gradient
            and value.is_cpu
            and not value.is_conj()
            and not value.is_neg()
        )

    def room(self) -> torch.Tensor:
        """A tensor to receive into."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")

    def numbers(self) -> list[int]:
        """The header."""
        rest = [0] * (_MOST - len(self.shape))
        first = (int(self.kind), int(self.wants_gradient), _NUMBERS[self.dtype], len(self.shape), self.nbytes)
        return [*first, *self.shape, *rest, *self.strides, *rest]

    @classmethod
    def read(cls, header: Sequence[int]) -> MessageLayout:
        kind, wants, dtype, dims, nbytes, *rest = header
        shape, strides = tuple(rest[:dims]), tuple(rest[_MOST : _MOST + dims])
        return cls(PayloadKind(kind), nbytes, bool(wants), _DTYPES[dtype], shape, strides)

    def decoded(self, content: torch.Tensor | None) -> Any:
        """The value that was sent, once its bytes are there."""
        if content is None or self.kind is PayloadKind.NOTHING:
            return None
        if self.kind is PayloadKind.OBJECT:
            return pickle.loads(content.numpy().tobytes())  # noqa: S301 it comes from a rank of this very program
        return content.requires_grad_(self.wants_gradient)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def encoded(value: Any) -> tuple[MessageLayout, torch.Tensor | None]:
    """The layout of any value, and the tensor with its bytes: the value itself where that is possible."""
    if value is None:
        return MessageLayout(PayloadKind.NOTHING), None
    if not _is_plain(value):
        content = torch.frombuffer(bytearray(pickle.dumps(_detached(value))), dtype=torch.uint8)
        return MessageLayout(PayloadKind.OBJECT, len(content), shape=(len(content),), strides=(1,)), content
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    if not plain.permute(_order(plain.stride())).is_contiguous():
        plain = plain.contiguous()
    shape, strides = tuple(plain.shape), plain.stride()
    return MessageLayout(PayloadKind.TENSOR, plain.nbytes, value.requires_grad, plain.dtype, shape, strides), plain


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without holes."""
    return tensor.permute(_order(tensor.stride())).view(-1).view(torch.uint8)


def name_checksum(text: str) -> int:
    """What both ends call a value, as a number."""
    return crc32(text.encode())


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return type(value) in _PLAIN and value.dim() <= _MOST and not value.is_quantized


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _order(strides: Sequence[int]) -> list[int]:
    """The dimensions as they lie in memory, the slowest first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])
