"""What it takes to send a value from one pipeline device to another: a time per byte and a latency, by pair if asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipecompile.costs import spec_for
from pipecompile.errors import InputError
from pipecompile.ir import HOST, Route

__all__ = ["Bandwidth", "Links"]

Bandwidth = float | tuple[tuple[float, ...], ...]
"""Bytes per second: of every pair of devices, or of each."""


@dataclass(frozen=True, slots=True)
class Links:
    """`seconds_per_byte` and `latency` of the fastest pair; `factors[p][q]` how many times as long the pair p, q takes."""

    seconds_per_byte: float
    latency: float
    factors: tuple[tuple[float, ...], ...] | None = None

    @classmethod
    def of(cls, devices: Sequence[torch.device], bandwidth: Bandwidth | None) -> Links:
        """As told, else as the devices are known; nothing when all are one."""
        spec = spec_for(devices[0])
        if isinstance(bandwidth, tuple):
            pairs = [(p, q) for p in range(len(devices)) for q in range(len(devices)) if p != q]
            best = max((bandwidth[p][q] for p, q in pairs), default=1.0)
            rows = [
                [best / bandwidth[p][q] if p != q else 0.0 for q in range(len(devices))] for p in range(len(devices))
            ]
            return cls(1.0 / best, spec.link_latency, tuple(map(tuple, rows)))
        if bandwidth is not None:
            return cls(1.0 / bandwidth, spec.link_latency)
        return cls(0.0, 0.0) if len(set(devices)) == 1 else cls(1.0 / spec.link_bandwidth, spec.link_latency)

    def seconds(self, routes: Sequence[Route], placement: Sequence[int] | None) -> dict[str, float]:
        """What each route costs its slowest link, one way, for the simulator; the fastest there is, without a placement."""
        return {route.value: self._worst(route, placement) for route in routes}

    def _worst(self, route: Route, placement: Sequence[int] | None) -> float:
        once = self.latency + route.nbytes * self.seconds_per_byte
        if self.factors is None or placement is None or route.source == HOST:
            return once
        ends = [placement[end] for end in route.consumers if end != HOST]
        return once * max((self.factors[placement[route.source]][end] for end in ends), default=0.0)


def checked(bandwidth: float | Sequence[Sequence[float]] | None, n_devices: int) -> Bandwidth | None:
    """Raises InputError when it is not a positive number, or a square of such."""
    if bandwidth is None:
        return None
    if isinstance(bandwidth, (int, float)):
        rows: tuple[tuple[float, ...], ...] = ((float(bandwidth),),)
    else:
        rows = tuple(tuple(row) for row in bandwidth)
        if len(rows) != n_devices or any(len(row) != n_devices for row in rows):
            raise InputError(
                f"bandwidth is no {n_devices} by {n_devices} square", hint="bytes per second from each device to each"
            )
        rows = tuple(tuple(v if p != q else 1.0 for q, v in enumerate(row)) for p, row in enumerate(rows))
    if not all(value > 0 for row in rows for value in row):
        raise InputError("bandwidth must be above 0 between any two devices", hint="bytes per second")
    return rows[0][0] if isinstance(bandwidth, (int, float)) else rows
