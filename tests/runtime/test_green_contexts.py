"""The split of a card by the driver, on a pretended driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecompile.runtime import green_contexts
from pipecompile.runtime.green_contexts import NoPartitionsError, green_streams


class Driver:
    """The functions of the driver on a card with some multiprocessors; the one in `failing` fails."""

    class CUresult:
        CUDA_SUCCESS = 0

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, count: int, failing: str = "") -> None:
        self.whole, self.failing, self.contexts = list(range(count)), failing, list[list[int]]()
        self.functions = {
            "cuDeviceGet": self._card,
            "cuDeviceGetDevResource": self._whole,
            "cuDevSmResourceSplitByCount": self._split,
            "cuDevResourceGenerateDesc": self._description,
            "cuGreenCtxCreate": self._context,
            "cuGreenCtxStreamCreate": self._stream,
        }

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            return (801,) if name == self.failing else (0, *self.functions[name](*args))

        return call

    def _card(self, index: int) -> tuple[int]:
        return (index,)

    def _whole(self, *_: Any) -> tuple[Any]:
        return (self._group(self.whole),)

    @staticmethod
    def _group(numbers: list[int]) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=len(numbers)), numbers=numbers)

    def _split(self, count: int, whole: Any, _: int, each: int) -> tuple[Any, int, Any]:
        groups = [self._group(whole.numbers[i * each : (i + 1) * each]) for i in range(count)]
        return groups, count, self._group(whole.numbers[count * each :])

    def _description(self, groups: list[Any], _: int) -> tuple[Any]:
        return (groups[0].numbers,)

    def _context(self, numbers: list[int], *_: Any) -> tuple[int]:
        self.contexts.append(numbers)
        return (len(self.contexts),)

    def _stream(self, context: int, *_: Any) -> tuple[int]:
        return (1000 + context,)


def test_parts_of_a_card_have_no_multiprocessor_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(green_contexts.torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(
        torch.cuda,
        "ExternalStream",
        lambda number, device: SimpleNamespace(stream_id=number, device_index=device.index, device_type=1),
    )
    monkeypatch.setattr(torch, "Stream", lambda **given: tuple(given.values()))
    driver = Driver(132)
    streams, each = green_streams(torch.device("cuda:1"), 4, driver)
    assert streams == tuple((1000 + i, 1, 1) for i in range(1, 5))
    assert (each, [len(numbers) for numbers in driver.contexts]) == (32, [32] * 4)
    assert len({number for numbers in driver.contexts for number in numbers}) == 128
    with pytest.raises(NoPartitionsError, match="20 parts of at least 8 of 132"):
        green_streams(torch.device("cuda:1"), 20, Driver(132))
    for name in ("cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"):
        with pytest.raises(NoPartitionsError, match="the driver says 801"):
            green_streams(torch.device("cuda:1"), 4, Driver(132, name))


@pytest.mark.parametrize(
    "error", [RuntimeError('Function "cuGreenCtxCreate" not found'), AttributeError("cuGreenCtxCreate")]
)
def test_a_driver_or_a_package_without_green_contexts_has_no_partitions(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda.bindings raises a RuntimeError for a function that the driver lacks, and an older one has no such name: both passed."""
    monkeypatch.setattr(green_contexts.torch, "zeros", lambda *_, **__: None)
    driver = Driver(132)

    def missing(*_: object) -> None:
        raise error

    driver.functions["cuGreenCtxCreate"] = missing
    with pytest.raises(NoPartitionsError, match=r"no green contexts .*cuGreenCtxCreate"):
        green_streams(torch.device("cuda:1"), 4, driver)
