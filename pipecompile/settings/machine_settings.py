"""Options of the machine: its devices, what these hold and send, and how long they take for a node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from pipecompile.costs.device_specs import Bandwidth, DeviceSpec, Links, part_of, spec_for
from pipecompile.costs.optimizer_bytes import optimizer_state
from pipecompile.costs.user_costs import UserCosts
from pipecompile.errors import InputError
from pipecompile.ir import Schedule
from pipecompile.runtime.partitions import CardPartition, PartitionStreams
from pipecompile.runtime.streams import DeviceStreams
from pipecompile.schedules import CATALOGUE, Builder
from pipecompile.settings.value_checks import Group, choice, entries, number, refusal
from pipecompile.text.input_checks import near
from pipecompile.text.shown_value import shown
from pipecompile.text.units import parse_bytes
from pipecompile.torch_private.accelerators import accelerator_indices, accelerator_type

__all__ = [
    "MachineSettings",
    "check_graphs",
    "default_device_count",
    "optimizer_copies",
    "resolve_devices",
    "resolve_partitions",
]


_PER_DEVICE = ("memory_limit", "speeds")

_NO_LIMIT = float(2**60)
"""Bytes of a device without a limit, beside devices that have one."""


def _bytes_meant(text: str) -> str:
    """Return the number of bytes of a text such as "16GiB", as Python writes it."""
    try:
        return f"{parse_bytes(text):.0f}"
    except InputError:
        return "16 * 2**30"


def _memory_limit(name: str, value: Any) -> float | tuple[float, ...] | None:
    """Return bytes, or bytes per device; an infinite number of bytes is not a limit, which is None for all devices."""
    if value is None:
        return None
    check = number(16e9, finite=False)
    if isinstance(value, Sequence) and not isinstance(value, str):
        limits = entries(name, value, check, "a number of bytes above 0 per device", f"{name}=16 * 2**30")
        return tuple(min(limit, _NO_LIMIT) for limit in limits)
    if isinstance(value, str):
        raise refusal(name, value, "a number above 0", why="it is in bytes", hint=f"{name}={_bytes_meant(value)}")
    limit = check(name, value)
    return None if math.isinf(limit) else limit


def _speeds(name: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    return entries(name, value, number(1), "a finite number above 0 per device", f"{name}=[1.0, 0.5]")


def _bandwidth(name: str, value: Any) -> Bandwidth | None:
    """Return bytes per second, of all pairs of devices or of each as a square. Its diagonal is not used, and becomes 1."""
    if value is None:
        return None
    check, hint = number(16e9, finite=False), f"{name}=16e9, for all pairs of devices"
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        return float(check(name, value))
    rows = [tuple(row) if isinstance(row, Sequence) and not isinstance(row, str) else () for row in value]
    if not rows or any(len(row) != len(rows) for row in rows):
        raise refusal(name, value, "a square", why="a row per device has an entry per device", hint=hint)
    square = [[1.0 if p == q else entry for q, entry in enumerate(row)] for p, row in enumerate(rows)]
    expected = "bytes per second above 0 between any two devices"
    return tuple(entries(name, row, check, expected, hint) for row in square)


def _costs(name: str, value: Any) -> UserCosts | None:
    if value is None or callable(value):
        return value  # type: ignore[no-any-return]
    hint = f'{name}={{"layer3": 2e-3}}, seconds of forward and backward together'
    if not isinstance(value, Mapping):
        raise refusal(name, value, "a mapping of module names to seconds, nor a function", hint=hint)
    check = number(2e-3, zero=True)
    for module in value:
        if not isinstance(module, str):
            raise refusal(name, value, "a mapping of module names to seconds", where=f"key {shown(module)}", hint=hint)
    seconds = entries(name, value.values(), check, "a finite number of seconds per module", hint, places=list(value))
    return dict(zip(value, seconds, strict=True))


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Group):
    """Devices, one per pipeline device, and what is known of them. `optimizer_state` is the number of copies of a parameter that
    the optimizer keeps. `shards` is the number of ranks that have a part of each parameter. `partitions` are the parts of one card
    that the devices are; () if they are whole devices.
    """

    devices: tuple[torch.device, ...]
    memory_limit: Annotated[float | tuple[float, ...] | None, _memory_limit]
    optimizer_state: int
    speeds: Annotated[tuple[float, ...] | None, _speeds]
    bandwidth: Annotated[Bandwidth | None, _bandwidth]
    partitions: tuple[CardPartition, ...] = ()
    shards: int = 1
    cost: Annotated[str, choice("auto", "analytic", "profile")]
    costs: Annotated[UserCosts | None, _costs]

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(self.devices)
        for name in _PER_DEVICE:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != count:
                hint = f"{name}={[*value, *value[-1:] * count][:count]}"
                raise refusal(name, value, f"one entry per pipeline device: {len(value)} for {count}", hint=hint)
        if isinstance(self.bandwidth, tuple) and len(self.bandwidth) != count:
            hint = f"bandwidth={self.bandwidth[0][-1]:g}, for all pairs of devices"
            raise refusal("bandwidth", self.bandwidth, f"a {count} by {count} square", hint=hint)
        if self.cost == "profile" and callable(self.costs):
            why = "nothing is measured where a function returns the cost of every node"
            raise InputError(
                'cost="profile" is given together with a function as costs', why=why, hint="one of the two"
            )

    @property
    def links(self) -> Links:
        """Seconds per byte and latency between the devices."""
        if self.partitions and self.partitions[0].multiprocessors:
            return Links.within(self.devices[0], self.bandwidth)
        return Links.of(self.devices, self.bandwidth)

    @property
    def overlap(self) -> bool:
        """Whether copies between pipeline devices of this process run beside compute, on streams of their own."""
        return PartitionStreams(self.partitions).overlap if self.partitions else DeviceStreams(self.devices).overlap

    @property
    def cost_device(self) -> torch.device | DeviceSpec:
        """The device that costs are computed for: the first one, or as large a part of its data sheet as a partition is."""
        device, count = self.devices[0], len(self.partitions)
        if not count or not self.partitions[0].multiprocessors:
            return device
        return part_of(spec_for(device), self.partitions[0].count)

    @property
    def has_unequal_devices(self) -> bool:
        """Whether the cut depends on which device a stage is on."""
        return self.speeds is not None or self.memory_limit is not None or self.links.factors is not None


def optimizer_copies(optimizer: Any) -> int:
    """Return how many copies of a parameter an optimizer keeps. Raise InputError for an unknown one."""
    if not isinstance(optimizer, (str, torch.optim.Optimizer, type, type(None))):
        raise refusal("optimizer", optimizer, "the name of an optimizer, nor an optimizer", hint='optimizer="adam"')
    return 0 if optimizer is None else optimizer_state(optimizer)


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
        gpus = _accelerators()[:count]
        return tuple(gpus[i * len(gpus) // count] if gpus else torch.device("cpu") for i in range(count))
    if not isinstance(devices, (list, tuple)) or not devices:
        hint = f'devices=["cpu"] * {default_device_count(schedule, n_stages)}, one entry per pipeline device'
        raise refusal("devices", devices, "a list of devices", hint=hint)
    return tuple(_device(place, device) for place, device in enumerate(devices))


def resolve_partitions(devices: Any) -> tuple[CardPartition, ...]:
    """Return `devices` if they are parts of one card, () if there are none among them. Raise InputError for a mixture, or a part twice."""
    parts = (
        [device for device in devices or () if isinstance(device, CardPartition)]
        if isinstance(devices, (list, tuple))
        else []
    )
    if not parts:
        return ()
    if len(parts) < len(devices) or len({part.device for part in parts}) > 1 or len(set(map(id, parts))) < len(parts):
        what = "parts of one card, each once, or whole devices"
        raise refusal(
            "devices",
            [str(device) for device in devices],
            what,
            hint=f'devices=pc.partitions("{parts[0].device}", {len(devices)})',
        )
    return tuple(parts)


def check_graphs(partitions: Sequence[CardPartition], *, cuda_graphs: bool | str, dispatch: str) -> None:
    """Raise InputError for CUDA graphs on partitions, and for a graph of the whole step together with threads."""
    if partitions and cuda_graphs:
        what, why = (
            f"cuda_graphs={cuda_graphs!r} is given together with partitions of a card",
            "a graph is captured on all its multiprocessors",
        )
        raise InputError(what, why=why, hint="cuda_graphs=False")
    if cuda_graphs == "step" and dispatch == "threads":
        what, why = f"{cuda_graphs=} is given together with {dispatch=}", "one thread launches a whole step"
        raise InputError(what, why=why, hint='dispatch="inline", or cuda_graphs=True')


def _device(place: int, device: Any) -> torch.device:
    """Return entry `place` of `devices` with its index. Raise InputError unless the machine has it."""
    if isinstance(device, CardPartition):
        return device.device
    here = ["cpu", *map(str, _accelerators())]
    try:
        known = torch.device(device) if isinstance(device, (str, torch.device)) else None
        why = ""
    except RuntimeError as error:
        known, why = None, str(error).splitlines()[0]
    if known is None:
        hint = f"{near(str(device) if isinstance(device, torch.device) else device, here)!r} in its place"
        raise InputError(f"devices: {shown(device)} is not a device", where=f"entry {place}", why=why, hint=hint)
    if known.type == "cpu":
        return torch.device("cpu")
    index = known.index or 0
    if f"{known.type}:{index}" not in here:
        raise InputError(
            f"devices: there is no device {device!s} here", where=f"entry {place}",
            why=f"the devices here are {', '.join(here)}", hint=f"{here[-1]!r} in its place; repeats are allowed",
        )  # fmt: skip
    return torch.device(known.type, index)


def _accelerators() -> list[torch.device]:
    """Return the GPUs of the machine."""
    return [torch.device(str(accelerator_type()), index) for index in accelerator_indices()]
