"""Values go to a device in nested containers too; arguments of `Module.to` name a device or none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipecompile.batching.containers import on_device
from pipecompile.torch_private.device_functions import device_constructors, device_identity, requested_device, to_device

pytestmark = pytest.mark.smoke
META, CPU = torch.device("meta"), torch.device("cpu")


def test_a_tensor_on_the_device_is_returned_itself() -> None:
    x = torch.ones(2)
    assert to_device(x, CPU) is x


def test_the_host_waits_for_a_copy_to_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, torch copied from a GPU into page-locked memory, and a stage on the CPU read it before the copy was over."""
    queued: list[bool] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda *_, non_blocking: queued.append(non_blocking))
    for device in (CPU, torch.device("cuda:0")):
        there = torch.ones(2, device=META)
        to_device(there, device), on_device([there], device)
    assert queued == [False, False, True, True]
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)  # the caller may write it before the copy is over
    to_device(torch.ones(2), torch.device("cuda:0"))
    assert queued[4:] == [False]


@pytest.mark.parametrize(("arguments", "device"), [(("cpu",), CPU), ((torch.float16,), None), ((torch.ones(1),), CPU)])
def test_the_device_that_is_requested(arguments: tuple[object, ...], device: torch.device | None) -> None:
    assert requested_device(*arguments) == device


def test_functions_that_make_tensors_take_a_device() -> None:
    assert {torch.zeros, torch.arange} <= device_constructors()
    assert torch.add not in device_constructors()


def test_a_gpu_has_an_identity_that_no_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_identity(torch.device("cpu")) == ""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="H100", uuid=device.index)
    )
    assert device_identity(torch.device("cuda:1")) == "H100, 1"
