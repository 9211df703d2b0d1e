"""A value on its way between two ranks: a header of fixed length, which says what comes, and the bytes of it.

    header    mark, kind, wants a gradient?, dtype, dimensions, bytes, shape, strides      26 numbers
    bytes     the elements as they lie in memory

A tensor arrives with the strides it had where it was made, if they leave no holes, so that the same kernels run on it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import IntEnum
from typing import Any
from zlib import crc32

import torch

__all__ = ["HEADER", "Parcel", "end", "is_end", "mark_of", "opened", "packed", "room"]

_MOST = 10
HEADER = 6 + 2 * _MOST
"""The length of a header."""

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}

Parcel = tuple[torch.Tensor, torch.Tensor | None]


class Kind(IntEnum):
    """What the bytes are."""

    NOTHING = 0
    TENSOR = 1
    OBJECT = 2
    END = 3


def mark_of(text: str) -> int:
    """What both ends call a value, as a number."""
    return crc32(text.encode())


def packed(mark: int, value: Any) -> Parcel:
    """Header and bytes; the bytes are those of the value itself where that is possible."""
    if value is None:
        return _header(mark, Kind.NOTHING), None
    if not _is_plain(value):
        content = torch.frombuffer(bytearray(pickle.dumps(_detached(value))), dtype=torch.uint8)
        return _header(mark, Kind.OBJECT, (0, 0, 0, len(content))), content
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    if not plain.permute(_order(plain.stride())).is_contiguous():
        plain = plain.contiguous()
    numbers = (int(value.requires_grad), _NUMBERS[plain.dtype], plain.dim(), plain.nbytes)
    return _header(mark, Kind.TENSOR, numbers, plain.shape, plain.stride()), _bytes(plain) if plain.nbytes else None


def end() -> Parcel:
    """The last parcel: nothing comes any more."""
    return _header(0, Kind.END), None


def is_end(header: torch.Tensor) -> bool:
    return int(header[1]) == Kind.END


def room(header: torch.Tensor) -> Parcel:
    """A parcel to receive into: the tensor or the bytes that come, and the bytes of it, None when none come."""
    _, kind, _, dtype, dims, nbytes, *rest = header.tolist()
    if kind != Kind.TENSOR:
        content = torch.empty(nbytes, dtype=torch.uint8)
        return content, content if nbytes else None
    made = torch.empty_strided(rest[:dims], rest[_MOST : _MOST + dims], dtype=_DTYPES[dtype])
    return made, _bytes(made) if nbytes else None


def opened(header: torch.Tensor, content: torch.Tensor) -> Any:
    """The value that was sent, once its bytes are there."""
    _, kind, wants_gradient, *_ = header.tolist()
    if kind == Kind.NOTHING:
        return None
    if kind == Kind.OBJECT:
        return pickle.loads(bytes(content.tolist()))  # noqa: S301 it comes from a rank of this very program
    return content.requires_grad_(bool(wants_gradient))


def _header(
    mark: int, kind: Kind, numbers: Sequence[int] = (0, 0, 0, 0), shape: Sequence[int] = (), strides: Sequence[int] = ()
) -> torch.Tensor:
    """`numbers`: wants a gradient, dtype, dimensions, bytes."""
    rest = [0] * (_MOST - len(shape))
    return torch.tensor([mark, kind, *numbers, *shape, *rest, *strides, *rest], dtype=torch.int64)


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.dim() <= _MOST and not value.is_quantized


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _order(strides: Sequence[int]) -> list[int]:
    """The dimensions as they lie in memory, the slowest first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(_order(tensor.stride())).view(-1).view(torch.uint8)
