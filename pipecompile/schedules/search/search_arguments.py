"""Arguments of `auto_schedule`: the placements to try, and the memory of the devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from pipecompile.errors import InputError
from pipecompile.schedules.building_blocks import loop, zigzag
from pipecompile.schedules.search.evaluate import MemoryLimit
from pipecompile.text.input_checks import amounts, whole
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["PerDevice", "memory_bound", "placements_to_try"]

PerDevice = float | Sequence[float]
"""One number for all devices, or one per device."""


def placements_to_try(
    n_stages: int, n_devices: int | None, placement: Sequence[int] | None
) -> tuple[tuple[int, ...], ...]:
    """Return the placements to try: by default a loop and, where every device has equally many stages, to and fro, as Hanayo and with
    two stages per device all schedules in a V. Raises InputError for an invalid `placement` or number of devices.
    """
    if placement is not None:
        numbers = (
            tuple(placement) if isinstance(placement, Iterable) and getattr(placement, "shape", None) != () else ()
        )
        is_whole = all(isinstance(device, Integral) for device in numbers)
        if not is_whole or len(numbers) != n_stages or set(numbers) != set(range(max(numbers) + 1)):
            raise InputError(
                f"placement={shown(numbers or placement)} has no device for each of {counted(n_stages, 'stage')}",
                hint="devices are 0, 1, 2 ... and each has a stage",
            )
        return (tuple(map(int, numbers)),)
    devices = n_stages if n_devices is None else whole("n_devices", n_devices)
    if devices > n_stages:
        raise InputError(
            f"{counted(n_stages, 'stage')} cannot be placed on {counted(devices, 'device')}",
            why="every device has at least one stage",
            hint=f"n_devices from 1 to {n_stages}",
        )
    waves = () if n_stages % devices else (zigzag(n_stages, devices),)
    return tuple(dict.fromkeys((loop(n_stages, devices), *waves)))


def memory_bound(memory_limit: PerDevice | None, in_flight: PerDevice | None, n_devices: int) -> MemoryLimit | None:
    """Return the limit of every device; None without one. Raises InputError for both kinds of limits at once."""
    if memory_limit is None and in_flight is None:
        return None
    if memory_limit is not None and in_flight is not None:
        raise InputError("memory_limit and in_flight cannot both be given", hint="memory_limit, which is more precise")
    name, limit = ("in_flight", in_flight) if memory_limit is None else ("memory_limit", memory_limit)
    capacity = amounts(name, limit, n_devices, "device", finite=False)
    return MemoryLimit(capacity, in_bytes=memory_limit is not None)
