"""What `torch.accelerator` lacks, on pretended accelerators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecompile.torch_private import accelerators
from pipecompile.torch_private.accelerators import (
    OnStreams,
    accelerator_indices,
    accelerator_type,
    forked_generators,
    is_accelerator,
    random_state,
    set_random_state,
)


class Runtime:
    """Two devices: the current one, and the current stream of each. As in torch, a stream that is set makes its device current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index, self.streams = 0, {0: self.stream(0, "default"), 1: self.stream(1, "default")}
        for name, function in (
            ("current_device_index", lambda: self.index),
            ("set_device_index", lambda index: setattr(self, "index", index)),
            ("current_stream", lambda device: self.streams[device.index]),
            ("set_stream", self.set_stream),
        ):
            monkeypatch.setattr(torch.accelerator, name, function)

    @staticmethod
    def stream(index: int, name: str) -> Any:
        return SimpleNamespace(device=torch.device("cuda", index), name=name)

    def set_stream(self, stream: Any) -> None:
        self.index = stream.device.index
        self.streams[self.index] = stream

    def now(self) -> tuple[int, str, str]:
        return self.index, self.streams[0].name, self.streams[1].name


def test_streams_are_current_within_and_restored_after_also_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    ends = [runtime.stream(0, "out"), runtime.stream(1, "in")]
    with pytest.raises(KeyError), OnStreams(*ends):  # noqa: PT012
        assert runtime.now() == (1, "out", "in")
        with OnStreams(ends[0]):
            assert runtime.now() == (0, "out", "in")
        assert runtime.now() == (1, "out", "in")
        raise KeyError
    assert runtime.now() == (0, "default", "default")


def test_a_type_without_devices_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch built for CUDA names CUDA on a machine without a card."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert accelerator_type() is None
    assert list(accelerator_indices()) == []
    for kind, expected in (("xpu", "xpu"), ("mps", None)):  # mps has no streams
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind: torch.device(kind))
        assert accelerator_type() == expected
    assert not is_accelerator(torch.device("meta"))


def test_the_generator_of_a_device_is_that_of_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[Any, Any] = {}
    module = SimpleNamespace(
        get_rng_state=lambda device: states.get(device, "first"),
        set_rng_state=lambda state, device: states.update({device: state}),
    )
    monkeypatch.setattr(accelerators.torch, "get_device_module", lambda kind: {"xpu": module}[kind])
    monkeypatch.setattr(torch, "xpu", module)  # where torch 2.11 looks
    gpu = torch.device("xpu:1")
    assert random_state(gpu) == "first"
    set_random_state("second", gpu)  # type: ignore[arg-type]
    assert states == {gpu: "second"}
    with forked_generators([gpu, torch.device("cpu")]):
        states[gpu] = "drawn"
        torch.rand(1)
    assert states == {gpu: "second"}
