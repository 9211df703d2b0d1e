"""Links: time per byte and latency of a transfer between two pipeline devices, for all pairs or per pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipecompile.costs import spec_for
from pipecompile.ir import HOST, Route

__all__ = ["Bandwidth", "Links"]

Bandwidth = float | tuple[tuple[float, ...], ...]
"""Bytes per second: one number for all pairs of devices, or a square with one number per pair."""


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds per byte and seconds of latency of the fastest pair; `factors[p][q]` is the slowdown of the pair (p,
    q).
    """

    seconds_per_byte: float
    latency: float
    factors: tuple[tuple[float, ...], ...] | None = None

    @classmethod
    def of(cls, devices: Sequence[torch.device], bandwidth: Bandwidth | None) -> Links:
        """Return the links with the given `bandwidth`, else from the data sheets; zero if all stages share one
        device.
        """
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
        """Return, per route, the seconds of its slowest link in one direction; of the fastest link without a
        placement.
        """
        return {route.value: self._worst(route, placement) for route in routes}

    def _worst(self, route: Route, placement: Sequence[int] | None) -> float:
        once = self.latency + route.nbytes * self.seconds_per_byte
        if self.factors is None or placement is None or route.source == HOST:
            return once
        ends = [placement[end] for end in route.consumers if end != HOST]
        return once * max((self.factors[placement[route.source]][end] for end in ends), default=0.0)
