"""Green contexts: streams whose kernels run on a part of the multiprocessors of an NVIDIA GPU.

    132 multiprocessors   [ 0 ... 31 ][ 32 ... 63 ][ 64 ... 95 ][ 96 ... 127 ] 4 left         split once, so that no two parts share any
                           stream 0    stream 1     stream 2     stream 3

Every context of `torch.cuda.green_contexts` in torch 2.11 gets the first group, so two contexts share multiprocessors. This module calls
the driver through the package cuda.bindings instead, which comes with CUDA builds of torch (driver 12.4 or newer).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

__all__ = ["NoPartitionsError", "green_streams"]

GRANULE = 8
"""Multiprocessors of which the driver makes groups on compute capability 9 (cuDevSmResourceSplitByCount); a multiple of all others."""

_KEPT: list[object] = []
"""Green contexts: their streams are valid as long as they live."""


class NoPartitionsError(Exception):
    """The driver, the package or the card has no partitions. The message says which."""


def green_streams(device: torch.device, count: int, driver: Any = None) -> tuple[tuple[Any, ...], int]:
    """Return a stream on each of `count` disjoint parts of the multiprocessors of a GPU, and the multiprocessors of a part.

    `driver` is the module of the driver's functions, for tests. Raise NoPartitionsError.
    """
    torch.zeros(1, device=device)  # the context that torch computes in
    try:
        return _split(_driver() if driver is None else driver, device.index or 0, count)
    except (
        RuntimeError,
        AttributeError,
    ) as error:  # of cuda.bindings, for a function that a driver or the package lacks
        raise NoPartitionsError(f"the driver has no green contexts ({error})") from None


def _split(cu: Any, index: int, count: int) -> tuple[tuple[Any, ...], int]:
    card = _called(cu, cu.cuDeviceGet(index))
    whole = _called(cu, cu.cuDeviceGetDevResource(card, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    each = whole.sm.smCount // count // GRANULE * GRANULE
    if not each:
        raise NoPartitionsError(f"{count} parts of at least {GRANULE} of {whole.sm.smCount} multiprocessors")
    groups, found, _ = _called(cu, cu.cuDevSmResourceSplitByCount(count, whole, 0, each))
    if found < count:
        raise NoPartitionsError(f"the driver made {found} parts of {count}")
    return tuple(_stream(cu, card, group, index) for group in groups[:count]), each


def _stream(cu: Any, card: Any, group: Any, index: int) -> Any:
    """Return a stream on one group of multiprocessors, as a `torch.Stream`."""
    description = _called(cu, cu.cuDevResourceGenerateDesc([group], 1))
    context = _called(cu, cu.cuGreenCtxCreate(description, card, cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
    _KEPT.append(context)
    stream = _called(cu, cu.cuGreenCtxStreamCreate(context, cu.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    external = torch.cuda.ExternalStream(int(stream), device=torch.device("cuda", index))  # type: ignore[no-untyped-call]
    return torch.Stream(
        stream_id=external.stream_id, device_index=external.device_index, device_type=external.device_type
    )


def _driver() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NoPartitionsError(f"the package cuda.bindings is missing ({error})") from None


def _called(cu: Any, result: Any) -> Any:
    """Return the results of a driver function. Raise NoPartitionsError if it reports an error."""
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise NoPartitionsError(f"the driver says {result[0]}")
    return result[1] if len(result) == 2 else result[1:]
