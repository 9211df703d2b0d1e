"""What things cost: seconds per stage and kind of action, seconds per message, bytes per value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypedDict

from pipecompile.errors import InputError
from pipecompile.ir import Kind, Route, Tie

__all__ = ["CostOptions", "Costs", "Engines", "PerLink", "PerStage", "make_costs"]

PerStage = float | Sequence[float]
"""One number for all stages, or one per stage."""

PerLink = float | Mapping[tuple[int, int], float]
"""One number for all pairs of devices, or one per pair (source, target)."""


class Engines(Enum):
    """What a copy occupies. `PAIR`: the way from one device to another, so copies to different devices run side by side.
    `DEVICE`: the one engine of its source that sends, and the one of its target that receives.
    """

    PAIR = "pair"
    DEVICE = "device"


class CostOptions(TypedDict, total=False):
    """The costs that `simulate`, `advise` and `auto_schedule` take, by name; see `simulate`."""

    forward: PerStage
    input_grad: PerStage
    weight_grad: PerStage
    backward: PerStage | None
    recompute: PerStage | None
    transfer: float | Mapping[str, float]
    latency: PerLink
    bandwidth: PerLink
    engines: str
    saved_bytes: PerStage
    weight_saved_bytes: PerStage | None
    recipe_bytes: PerStage
    parameter_bytes: PerStage


@dataclass(frozen=True, slots=True)
class Costs:
    """Checked: `seconds[kind][stage]`, and what the simulator needs of everything else."""

    seconds: Mapping[Kind, tuple[float, ...]]
    transfer: Mapping[str, float]
    latency: PerLink
    bandwidth: PerLink
    engines: Engines
    saved: tuple[float, ...]
    weight_saved: tuple[float, ...]
    recipe: tuple[float, ...]
    parameters: tuple[float, ...]

    def message(self, name: str, nbytes: float, source: int, target: int) -> float:
        """Seconds that a value of this name and size takes between two devices."""
        pair = source, target
        latency = self.latency if isinstance(self.latency, float) else self.latency[pair]
        bandwidth = self.bandwidth if isinstance(self.bandwidth, float) else self.bandwidth[pair]
        return self.transfer.get(name, 0.0) + latency + nbytes / bandwidth


def make_costs(
    n_stages: int,
    n_devices: int,
    routes: Iterable[Route],
    ties: Iterable[Tie] = (),
    *,
    forward: PerStage = 1.0,
    input_grad: PerStage = 1.0,
    weight_grad: PerStage = 1.0,
    backward: PerStage | None = None,
    recompute: PerStage | None = None,
    transfer: float | Mapping[str, float] = 0.0,
    latency: PerLink = 0.0,
    bandwidth: PerLink = math.inf,
    engines: str = "pair",
    saved_bytes: PerStage = 0.0,
    weight_saved_bytes: PerStage | None = None,
    recipe_bytes: PerStage = 0.0,
    parameter_bytes: PerStage = 0.0,
) -> Costs:
    """Raises InputError naming the argument that is not a finite number per stage, route or pair of devices."""

    def stages(name: str, given: PerStage) -> tuple[float, ...]:
        return _per_stage(name, given, n_stages)

    f, i, w = (
        stages(*pair) for pair in (("forward", forward), ("input_grad", input_grad), ("weight_grad", weight_grad))
    )
    seconds = {Kind.FORWARD: f, Kind.INPUT_GRAD: i, Kind.WEIGHT_GRAD: w}
    both = tuple(a + b for a, b in zip(i, w, strict=True))
    seconds[Kind.BACKWARD] = both if backward is None else stages("backward", backward)
    seconds[Kind.RECOMPUTE] = f if recompute is None else stages("recompute", recompute)
    saved = stages("saved_bytes", saved_bytes)
    if engines not in ("pair", "device"):
        raise InputError(f"engines={engines!r} is not known", hint="'pair' or 'device'")
    return Costs(
        seconds,
        _per_route(transfer, [route.value for route in routes], [tie.name for tie in ties]),
        _per_link("latency", latency, n_devices),
        _per_link("bandwidth", bandwidth, n_devices),
        Engines(engines),
        saved,
        saved if weight_saved_bytes is None else stages("weight_saved_bytes", weight_saved_bytes),
        stages("recipe_bytes", recipe_bytes),
        stages("parameter_bytes", parameter_bytes),
    )


def _per_stage(name: str, given: PerStage, n_stages: int) -> tuple[float, ...]:
    numbers = (given,) * n_stages if isinstance(given, int | float) else tuple(given)
    if len(numbers) != n_stages:
        raise InputError(
            f"{name} has {len(numbers)} numbers for {n_stages} stages", hint="one number, or one per stage"
        )
    return tuple(_checked(name, number) for number in numbers)


def _per_route(transfer: float | Mapping[str, float], names: list[str], optional: list[str]) -> dict[str, float]:
    if isinstance(transfer, int | float):
        return dict.fromkeys([*names, *optional], _checked("transfer", transfer))
    if missing := [name for name in names if name not in transfer]:
        raise InputError(
            f"transfer has no entry for route {missing[0]!r}", hint="one number, or one per route by its value's name"
        )
    return {name: _checked(f"transfer[{name!r}]", transfer[name]) for name in [*names, *optional] if name in transfer}


def _per_link(name: str, given: PerLink, n_devices: int) -> PerLink:
    check = _checked if name == "latency" else _positive
    if isinstance(given, int | float):
        return check(name, given)
    pairs = [(a, b) for a in range(n_devices) for b in range(n_devices) if a != b]
    if missing := [pair for pair in pairs if pair not in given]:
        raise InputError(
            f"{name} has no entry for devices {missing[0]}", hint="one number, or one per pair (source, target)"
        )
    return {pair: check(f"{name}[{pair}]", given[pair]) for pair in pairs}


def _checked(name: str, number: float) -> float:
    if not (math.isfinite(number) and number >= 0):
        raise InputError(f"{name} must be finite and not negative, not {number!r}")
    return float(number)


def _positive(name: str, number: float) -> float:
    if not number > 0:
        raise InputError(f"{name} must be positive, not {number!r}")
    return float(number)
