"""`pipecompile env`: versions, devices, and what has been proven on them."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich import box
from rich.table import Table

from pipecompile import __version__
from pipecompile.cli.command_report import CommandReport
from pipecompile.text.units import BYTES, counted, written
from pipecompile.torch_private.accelerators import accelerator_indices, accelerator_type, device_memory, device_name

__all__ = ["environment_report"]

_PACKAGES = {
    "torch": "", "numpy": "", "networkx": "", "highspy": "integer programs", "ortools": "extra exact: proofs of schedules",
    "typer": "", "rich": "", "matplotlib": "pictures", "torchvision": "torchvision:NAME", "timm": "timm:NAME",
    "transformers": "hf:NAME", "accelerate": "", "peft": "", "lightning": "", "pytorch-lightning": "",
}  # fmt: skip
_PROVEN = {
    "cpu": "equal to eager bit for bit, or refused, or warned of: one process, and ranks of gloo",
    "cuda": "not seen yet: written, and tested on emulated devices",
}


def environment_report() -> CommandReport:
    """Report versions, devices and what is proven on them."""
    import torch

    packages = {name: _version(name) for name in _PACKAGES}
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    devices = _devices()
    backends = [name for name in ("gloo", "nccl") if torch.distributed.is_available() and _has_backend(name)]
    data = {
        "pipecompile": __version__, "python": python, "packages": packages, "devices": devices, "backends": backends,
        "threads": torch.get_num_threads(), "proven": _PROVEN,
    }  # fmt: skip
    head = f"pipecompile {__version__}, Python {python}, torch with {counted(torch.get_num_threads(), 'thread')}, {', '.join(backends) or 'no'} ranks"
    return CommandReport(data, (head, _packages_table(packages), _devices_table(devices)))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _has_backend(name: str) -> bool:
    import torch.distributed as dist

    return dist.is_nccl_available() if name == "nccl" else dist.is_gloo_available()


def _devices() -> list[dict[str, Any]]:
    """Return name, cores or bytes of memory, and what is proven, of the CPU and of each GPU."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": f"{cores} cores", "proven": _PROVEN["cpu"]}]
    for index in accelerator_indices():
        device = torch.device(str(accelerator_type()), index)
        name = f"{device_name(device)}, {written(BYTES, device_memory(device))}"
        devices.append({"device": str(device), "name": name, "proven": _PROVEN["cuda"]})
    return devices


def _packages_table(packages: dict[str, str | None]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("package", "version", "for"):
        table.add_column(header)
    for name, number in packages.items():
        table.add_row(name, number or "not installed", _PACKAGES[name])
    return table


def _devices_table(devices: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("device", "", "proven"):
        table.add_column(header)
    for device in devices:
        table.add_row(device["device"], device["name"], device["proven"])
    return table
