"""Where stages live when a schedule is free to choose.

    stage    0 1 2 3 4 5 6 7
    device   0 1 2 3 0 1 2 3      loop, 4 devices

In a loop, stages are dealt out to the devices like cards.
"""

from __future__ import annotations

__all__ = ["loop"]


def loop(n_stages: int, n_devices: int) -> tuple[int, ...]:
    """`placement[s] = s mod n_devices`; with as many devices as stages, stage s is on device s."""
    return tuple(stage % n_devices for stage in range(n_stages))
