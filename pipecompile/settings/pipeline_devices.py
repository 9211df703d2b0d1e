"""The pipeline devices: those of the keyword `devices`, or the machine's."""

from __future__ import annotations

from typing import Any

import torch

from pipecompile.errors import InputError
from pipecompile.ir import Schedule
from pipecompile.schedules import CATALOGUE, Builder
from pipecompile.settings.value_checks import near, refusal, shown

__all__ = ["default_device_count", "resolve_devices"]


def default_device_count(schedule: str | Schedule | Builder, n_stages: int) -> int:
    """Return the number of pipeline devices without `devices`: one per stage, or as many as the schedule has."""
    if isinstance(schedule, Schedule):
        return schedule.n_devices
    entry = CATALOGUE.get(schedule) if isinstance(schedule, str) else None
    return n_stages if entry is None else entry.devices(n_stages)


def resolve_devices(
    devices: Any, n_stages: int, schedule: str | Schedule | Builder = "1f1b"
) -> tuple[torch.device, ...]:
    """Return one device per pipeline device. None stands for the GPUs of the machine, of which neighbouring stages share one if
    there are few, or for the CPU without a GPU.

    Raise InputError for a device that does not exist.
    """
    if devices is None:
        count = default_device_count(schedule, n_stages)
        gpus = min(torch.cuda.device_count(), count)
        return tuple(torch.device("cuda", i * gpus // count) if gpus else torch.device("cpu") for i in range(count))
    if not isinstance(devices, (list, tuple)) or not devices:
        hint = f'devices=["cpu"] * {default_device_count(schedule, n_stages)}, one entry per pipeline device'
        raise refusal("devices", devices, "a list of devices", hint=hint)
    return tuple(_device(place, device) for place, device in enumerate(devices))


def _device(place: int, device: Any) -> torch.device:
    """Return entry `place` of `devices` with its index. Raise InputError unless the machine has it."""
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    try:
        known = torch.device(device) if isinstance(device, (str, torch.device)) else None
        why = ""
    except RuntimeError as error:
        known, why = None, str(error).splitlines()[0]
    if known is None:
        hint = f"{near(device, here)!r} in its place"
        raise InputError(f"devices: {shown(device)} is not a device", where=f"entry {place}", why=why, hint=hint)
    if known.type == "cpu":
        return torch.device("cpu")
    index = known.index or 0
    if known.type != "cuda" or index >= len(here) - 1:
        raise InputError(
            f"devices: there is no device {device!s} here", where=f"entry {place}",
            why=f"the devices here are {', '.join(here)}", hint=f"{here[-1]!r} in its place; repeats are allowed",
        )  # fmt: skip
    return torch.device(known.type, index)
