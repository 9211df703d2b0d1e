"""Placements of stages on devices: loop and vee.

    stage    0 1 2 3 4 5 6 7
    device   0 1 2 3 0 1 2 3      loop, 4 devices
    device   0 1 2 3 3 2 1 0      vee, 4 devices

In a loop, stages go to the devices in turn. In a vee the first device also has the last stage, and the turn at the bottom needs
no transfer.
"""

from __future__ import annotations

__all__ = ["loop", "vee"]


def loop(n_stages: int, n_devices: int) -> tuple[int, ...]:
    """Return the device of each stage, `s mod n_devices`."""
    return tuple(stage % n_devices for stage in range(n_stages))


def vee(n_devices: int) -> tuple[int, ...]:
    """Return the device of each of 2 * n_devices stages: device d has stages d and 2 * n_devices - 1 - d."""
    return (*range(n_devices), *reversed(range(n_devices)))
