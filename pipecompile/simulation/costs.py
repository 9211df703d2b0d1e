"""Cost model of the simulator: seconds per stage and kind of action, seconds per message, bytes per stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from hashlib import sha256

from pipecompile.errors import InputError
from pipecompile.ir import SHARDING, Action, Kind, Route, Tie
from pipecompile.simulation.overlap_costs import PerPair, checked_overlap, communication_seconds
from pipecompile.simulation.sharding_costs import ShardingCosts, ShardingOptions, make_sharding_costs
from pipecompile.simulation.slice_costs import SliceCosts, SliceOptions, make_slice_costs
from pipecompile.text.input_checks import amount, amounts, known_names, whole
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["CostOptions", "Costs", "Engines", "Hosts", "PerLink", "PerStage", "cost_fingerprint", "make_costs"]

PerStage = float | Sequence[float]
"""One number for all stages, or one per stage."""

PerLink = float | Mapping[tuple[int, int], float]
"""One number for all pairs of devices, or one per pair (source, target)."""


class Engines(Enum):
    """Resources that a copy occupies. `PAIR`: the link from its source to its target, so copies to different devices overlap.
    `DEVICE`: the one sending engine of its source and the one receiving engine of its target.
    """

    PAIR = "pair"
    DEVICE = "device"


class Hosts(Enum):
    """Threads that launch: `ONE` for all devices, as `dispatch="inline"`, or one per `DEVICE`, as `dispatch="threads"` and ranks. With
    `STEP`, one launch starts all of the step, as `cuda_graphs="step"`; it takes the time of the longest launch of an F.
    """

    ONE = "one"
    DEVICE = "device"
    STEP = "step"


class CostOptions(ShardingOptions, SliceOptions, total=False):
    """Keyword costs of `simulate`, `advise` and `auto_schedule`; documented at `simulate`."""

    forward: PerStage
    input_grad: PerStage
    weight_grad: PerStage
    backward: PerStage | None
    recompute: PerStage | None
    offload: PerStage
    overlap: PerPair | None
    forward_communication: PerStage
    backward_communication: PerStage
    transfer: float | Mapping[str, float]
    latency: PerLink
    bandwidth: PerLink
    host_latency: float
    host_bandwidth: float
    engines: str
    launch: PerStage
    hosts: str
    streams: Sequence[int] | None
    saved_bytes: PerStage
    weight_saved_bytes: PerStage | None
    recipe_bytes: PerStage
    parameter_bytes: PerStage


@dataclass(frozen=True, slots=True)
class Costs:
    """Checked costs.

    `seconds[kind][stage]` is the time of an action; `transfer[name]` the seconds of a message of the route or tie `name`, `latency` in
    seconds and `bandwidth` in bytes/s come on top. `launch[stage]` is the seconds of the host for an action, `streams[device]` the
    stream that a device computes on; () if each has its own. `offload[stage]` is the seconds of a copy of what its forward saved to the
    host, or back; () if all are 0. `overlap` is the seconds of a pair of actions that overlap; None if they follow from
    `communication[stage]`, the seconds that F, and B or I, spend on communication within the stage, () for none. `sharding` is None if
    parameters cost nothing. `slices` has the shares of slices; None if micro-batches are whole, whose seconds and bytes the other costs
    are. `host_link` has the latency and bandwidth of copies of inputs. `saved` to `parameters` are bytes per stage.
    """

    seconds: Mapping[Kind, tuple[float, ...]]
    transfer: Mapping[str, float]
    latency: PerLink
    bandwidth: PerLink
    engines: Engines
    saved: tuple[float, ...]
    weight_saved: tuple[float, ...]
    recipe: tuple[float, ...]
    parameters: tuple[float, ...]
    launch: tuple[float, ...] = ()
    hosts: Hosts = Hosts.ONE
    streams: tuple[int, ...] = ()
    offload: tuple[float, ...] = field(default=(), repr=False)
    overlap: PerPair | None = field(default=None, repr=False)
    communication: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    sharding: ShardingCosts | None = field(default=None, repr=False)
    host_link: tuple[float, float] = field(default=(0.0, math.inf), repr=False)
    slices: SliceCosts | None = field(default=None, repr=False)

    def action_seconds(self, action: Action) -> float:
        """Return the seconds of an action, of a slice its share in those of a micro-batch."""
        return self.seconds[action.kind][action.stage] * self._time_share(action)

    def _time_share(self, action: Action) -> float:
        return 1.0 if self.slices is None else self.slices.of_seconds(action.slice)

    def byte_share(self, action: Action) -> float:
        """Return the share of an action in the bytes of its micro-batch: 1, or that of its slice."""
        return 1.0 if self.slices is None else self.slices.of_bytes(action.slice)

    def offload_seconds(self, stage: int) -> float:
        """Return the seconds of a copy of what the forward of a stage saved, to the host or back."""
        return self.offload[stage] if self.offload else 0.0

    @property
    def has_input_seconds(self) -> bool:
        """Return whether copies of inputs from the host may take time."""
        return self.host_link != (0.0, math.inf)

    def input_seconds(self, nbytes: float) -> float:
        """Return the seconds of a copy of an input of `nbytes` bytes from the host to a device."""
        latency, bandwidth = self.host_link
        return latency + nbytes / bandwidth

    def overlap_seconds(self, first: Action, second: Action) -> float:
        """Return the seconds of two actions that overlap.

        Unless they are given, the two share two resources, compute and communication, each of which serves one at a time: the pair
        takes the seconds of the busier resource, and no less than either action.
        """
        if isinstance(self.overlap, Mapping):
            if (stages := (first.stage, second.stage)) not in self.overlap:
                raise InputError(f"overlap has no entry for stages {stages}", why=f"{first} overlaps with {second}")
            return self.overlap[stages]
        forward, backward = self.action_seconds(first), self.action_seconds(second)
        if self.overlap is not None or not self.communication:
            return forward + backward if self.overlap is None else self.overlap
        pair = enumerate((first, second))
        communication = sum(self.communication[a.stage][way] * self._time_share(a) for way, a in pair)
        return max(forward, backward, communication, forward + backward - communication)

    def message(self, name: str, nbytes: float, source: int, target: int, share: float = 1.0) -> float:
        """Return the seconds of this share of a message of route or tie `name` with `nbytes` bytes from device `source` to `target`."""
        pair = source, target
        latency = self.latency if isinstance(self.latency, float) else self.latency[pair]
        bandwidth = self.bandwidth if isinstance(self.bandwidth, float) else self.bandwidth[pair]
        return self.transfer.get(name, 0.0) * share + latency + nbytes * share / bandwidth


def cost_fingerprint(costs: Costs, routes: Iterable[Route]) -> str:
    """Return a hash of costs and routes: equal for equal ones."""
    has_overlap = costs.overlap is not None or bool(costs.communication)
    later = (costs.offload, costs.overlap, costs.communication) if has_overlap else (costs.offload,)
    sharded = () if costs.sharding is None else (costs.sharding,)
    inputs = (costs.host_link,) if costs.has_input_seconds else ()
    sliced = () if costs.slices is None else (costs.slices,)
    parts = (costs, tuple(routes), *(later if any(later) or has_overlap else ()), *sharded, *inputs, *sliced)
    return sha256(repr(parts).encode()).hexdigest()[:16]


def make_costs(
    n_stages: int,
    n_devices: int,
    routes: Iterable[Route],
    ties: Iterable[Tie] = (),
    n_slices: int = 1,
    *,
    forward: PerStage = 1.0,
    input_grad: PerStage = 1.0,
    weight_grad: PerStage = 1.0,
    backward: PerStage | None = None,
    recompute: PerStage | None = None,
    offload: PerStage = 0.0,
    overlap: PerPair | None = None,
    forward_communication: PerStage = 0.0,
    backward_communication: PerStage = 0.0,
    transfer: float | Mapping[str, float] = 0.0,
    latency: PerLink = 0.0,
    bandwidth: PerLink = math.inf,
    host_latency: float = 0.0,
    host_bandwidth: float = math.inf,
    engines: str = "pair",
    launch: PerStage = 0.0,
    hosts: str = "one",
    streams: Sequence[int] | None = None,
    saved_bytes: PerStage = 0.0,
    weight_saved_bytes: PerStage | None = None,
    recipe_bytes: PerStage = 0.0,
    parameter_bytes: PerStage = 0.0,
    **others: object,
) -> Costs:
    """Return checked costs. Raises InputError that names the argument that is unknown, or not a finite number per stage, route,
    link or slice.
    """
    stages = partial(_of_stages, n_stages)
    known_names("the cost", others, CostOptions.__annotations__)
    _check_names(engines=(engines, Engines), hosts=(hosts, Hosts))
    saved = stages("saved_bytes", saved_bytes)
    seconds = _seconds(n_stages, forward, input_grad, weight_grad, backward, recompute)
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
        stages("launch", launch),
        Hosts(hosts),
        _shared_streams(streams, n_devices),
        copies if any(copies := stages("offload", offload)) else (),
        checked_overlap(overlap, n_stages),
        communication_seconds(seconds, forward_communication, backward_communication),
        make_sharding_costs(n_stages, others),
        (amount("host_latency", host_latency), amount("host_bandwidth", host_bandwidth, zero=False, finite=False)),
        make_slice_costs(n_slices, {**others, "overlap": overlap}),
    )


def _of_stages(n_stages: int, name: str, value: PerStage) -> tuple[float, ...]:
    return amounts(name, value, n_stages, "stage")


def _seconds(
    n_stages: int,
    forward: PerStage,
    input_grad: PerStage,
    weight_grad: PerStage,
    backward: PerStage | None,
    recompute: PerStage | None,
) -> dict[Kind, tuple[float, ...]]:
    """Return the seconds of each kind of action per stage. By default, B takes as long as I and W, and R as F."""
    names = ("forward", "input_grad", "weight_grad")
    f, i, w = (
        amounts(name, value, n_stages, "stage")
        for name, value in zip(names, (forward, input_grad, weight_grad), strict=True)
    )
    both = tuple(a + b for a, b in zip(i, w, strict=True))
    return {
        Kind.FORWARD: f,
        Kind.INPUT_GRAD: i,
        Kind.WEIGHT_GRAD: w,
        Kind.BACKWARD: both if backward is None else amounts("backward", backward, n_stages, "stage"),
        Kind.RECOMPUTE: f if recompute is None else amounts("recompute", recompute, n_stages, "stage"),
        **dict.fromkeys((Kind.OFFLOAD, Kind.RELOAD, *SHARDING), (0.0,) * n_stages),
    }


def _check_names(**options: tuple[object, type[Enum]]) -> None:
    for option, (value, kind) in options.items():
        known = [one.value for one in kind]
        if not isinstance(value, str) or value not in known:
            raise InputError(f"{option}={shown(value)} is not known", hint=" or ".join(map(repr, known)))


def _shared_streams(streams: Sequence[int] | None, n_devices: int) -> tuple[int, ...]:
    """Return the stream of each device; () if no two devices share one."""
    if streams is None:
        return ()
    if isinstance(streams, str) or not isinstance(streams, Sequence):
        raise InputError(f"streams={shown(streams)} is not a number per device")
    if len(streams) != n_devices:
        count = counted(len(streams), "number")
        raise InputError(f"streams has {count} for {counted(n_devices, 'device')}", hint="one per device")
    numbers = tuple(whole("streams", number, 0) for number in streams)
    return numbers if len(set(numbers)) < n_devices else ()


def _per_route(transfer: float | Mapping[str, float], names: list[str], optional: list[str]) -> dict[str, float]:
    if not isinstance(transfer, Mapping):
        return dict.fromkeys([*names, *optional], amount("transfer", transfer))
    if missing := [name for name in names if name not in transfer]:
        raise InputError(
            f"transfer has no entry for route {shown(missing[0])}",
            hint="one number, or one per route by its value's name",
        )
    known_names("transfer: route", transfer, [*names, *optional])
    return {name: amount(f"transfer[{name!r}]", transfer[name]) for name in [*names, *optional] if name in transfer}


def _per_link(name: str, value: PerLink, n_devices: int) -> PerLink:
    check = amount if name == "latency" else partial(amount, zero=False, finite=False)
    if not isinstance(value, Mapping):
        return check(name, value)
    pairs = [(a, b) for a in range(n_devices) for b in range(n_devices) if a != b]
    if missing := [pair for pair in pairs if pair not in value]:
        raise InputError(
            f"{name} has no entry for devices {missing[0]}", hint="one number, or one per pair (source, target)"
        )
    return {pair: check(f"{name}[{pair}]", value[pair]) for pair in pairs}
