"""Where stages live when a schedule is free to choose.

    stage    0 1 2 3 4 5 6 7
    device   0 1 2 3 0 1 2 3      loop, 4 devices
    device   0 1 2 3 3 2 1 0      vee, 4 devices

In a loop, stages are dealt out to the devices like cards. In a vee they go down and come back up, so that the first
device also has the last stage, and the turn at the bottom needs no transfer.
"""

from __future__ import annotations

__all__ = ["loop", "vee"]


def loop(n_stages: int, n_devices: int) -> tuple[int, ...]:
    """`placement[s] = s mod n_devices`; with as many devices as stages, stage s is on device s."""
    return tuple(stage % n_devices for stage in range(n_stages))


def vee(n_devices: int) -> tuple[int, ...]:
    """Two stages per device: d and 2 * n_devices - 1 - d."""
    return (*range(n_devices), *reversed(range(n_devices)))
