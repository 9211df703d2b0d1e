"""Cost model of the simulator: seconds per stage and kind of action, seconds per message, bytes per stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from hashlib import sha256
from typing import Any, Unpack

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
    """Keyword costs of `simulate`, `advise` and `auto_schedule`; documented at `simulate`. `DEFAULTS` has those that are not given."""

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
    engines: str

    host_latency: float
    host_bandwidth: float
    launch: PerStage
    hosts: str
    streams: Sequence[int] | None

    saved_bytes: PerStage
    weight_saved_bytes: PerStage | None
    recipe_bytes: PerStage
    parameter_bytes: PerStage


DEFAULTS = CostOptions(
    forward=1.0, input_grad=1.0, weight_grad=1.0, backward=None, recompute=None, offload=0.0,
    overlap=None, forward_communication=0.0, backward_communication=0.0,
    transfer=0.0, latency=0.0, bandwidth=math.inf, engines="pair",
    host_latency=0.0, host_bandwidth=math.inf, launch=0.0, hosts="one", streams=None,
    saved_bytes=0.0, weight_saved_bytes=None, recipe_bytes=0.0, parameter_bytes=0.0,
)  # fmt: skip


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
    **options: Unpack[CostOptions],
) -> Costs:
    """Return checked costs. Raises InputError that names the argument that is unknown, or not a finite number per stage, route,
    link or slice.
    """
    known_names("the cost", options, CostOptions.__annotations__)
    values: CostOptions = {**DEFAULTS, **options}
    _check_names(engines=(values["engines"], Engines), hosts=(values["hosts"], Hosts))
    stages = partial(_of_stages, values, n_stages)
    saved, seconds = stages("saved_bytes"), _seconds(stages)
    return Costs(
        seconds,
        transfer=_per_route(values["transfer"], [route.value for route in routes], [tie.name for tie in ties]),
        latency=_per_link("latency", values["latency"], n_devices),
        bandwidth=_per_link("bandwidth", values["bandwidth"], n_devices),
        engines=Engines(values["engines"]),
        saved=saved,
        weight_saved=stages("weight_saved_bytes", saved),
        recipe=stages("recipe_bytes"),
        parameters=stages("parameter_bytes"),
        launch=stages("launch"),
        hosts=Hosts(values["hosts"]),
        streams=_shared_streams(values["streams"], n_devices),
        offload=copies if any(copies := stages("offload")) else (),
        overlap=checked_overlap(values["overlap"], n_stages),
        communication=communication_seconds(seconds, values["forward_communication"], values["backward_communication"]),
        sharding=make_sharding_costs(n_stages, options),
        host_link=_host_link(values),
        slices=make_slice_costs(n_slices, options),
    )


def _of_stages(
    values: Mapping[str, Any], n_stages: int, name: str, default: tuple[float, ...] | None = None
) -> tuple[float, ...]:
    """Return the numbers of an option, one per stage; `default` if the option is None and there is a default."""
    if default is not None and values[name] is None:
        return default
    return amounts(name, values[name], n_stages, "stage")


def _seconds(stages: Callable[..., tuple[float, ...]]) -> dict[Kind, tuple[float, ...]]:
    """Return the seconds of each kind of action per stage. By default, B takes as long as I and W, and R as F."""
    f, i, w = map(stages, ("forward", "input_grad", "weight_grad"))
    return {
        Kind.FORWARD: f,
        Kind.INPUT_GRAD: i,
        Kind.WEIGHT_GRAD: w,
        Kind.BACKWARD: stages("backward", tuple(a + b for a, b in zip(i, w, strict=True))),
        Kind.RECOMPUTE: stages("recompute", f),
        **dict.fromkeys((Kind.OFFLOAD, Kind.RELOAD, *SHARDING), (0.0,) * len(f)),
    }


def _host_link(values: CostOptions) -> tuple[float, float]:
    """Return the latency and bandwidth of copies of inputs."""
    latency = amount("host_latency", values["host_latency"])
    return latency, amount("host_bandwidth", values["host_bandwidth"], zero=False, finite=False)


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
