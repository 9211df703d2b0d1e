"""What there is to schedule: per stage the seconds and bytes of one micro-batch, and what goes from stage to stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipecompile.ir import HOST, Kind, Route
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.from_schedule import wires

__all__ = ["Parcel", "Work", "unit_work", "within", "work_of"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one cell sends to one device, in so many seconds, and the stages there that wait for it."""

    device: int
    seconds: float
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch on all stages. `ahead[s]` are the parcels of the forward of s, `back[s]` those of its backward; to the
    device that s is on they take no time.

    A forward saves `saved[s]`; a split backward leaves `weight_saved[s]` of it for W. The forward of a stage with `again`
    keeps `kept[s]` alone, and R brings back the rest.
    """

    placement: tuple[int, ...]
    n_devices: int
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...]
    ahead: tuple[tuple[Parcel, ...], ...]
    back: tuple[tuple[Parcel, ...], ...]
    saved: tuple[float, ...]
    weight_saved: tuple[float, ...]
    kept: tuple[float, ...]
    again: tuple[bool, ...]
    split: bool = True

    @property
    def n_stages(self) -> int:
        return len(self.placement)


def unit_work(placement: Sequence[int]) -> Work:
    """A chain on which everything takes one second, transfers none, and every forward saves one byte until its W."""
    n_stages = len(placement)
    ones, twos, stages = (1.0,) * n_stages, (2.0,) * n_stages, range(n_stages)
    ahead = tuple((Parcel(placement[s + 1], 0.0, (s + 1,)),) if s + 1 < n_stages else () for s in stages)
    back = tuple((Parcel(placement[s - 1], 0.0, (s - 1,)),) if s else () for s in stages)
    none = (False,) * n_stages
    return Work(tuple(placement), max(placement) + 1, ones, ones, ones, twos, ones, ahead, back, ones, ones, ones, none)


def within(room: float) -> float:
    """What may be held in `room`: a little more, for what rounding adds to a sum that is just as large."""
    return room * (1 + 1e-12)


def work_of(
    placement: Sequence[int],
    routes: Sequence[Route],
    costs: Costs,
    *,
    again: Sequence[bool] | None = None,
    split: bool = True,
) -> Work:
    """The work of these routes and costs; stages with `again` are recomputed, backwards are `split` or whole."""
    n_stages = len(placement)
    ahead: list[list[Parcel]] = [[] for _ in placement]
    back: list[list[Parcel]] = [[] for _ in placement]
    for route in routes:
        for end in route.consumers if route.source != HOST else ():
            if end != HOST and placement[end] == placement[route.source]:
                ahead[route.source].append(Parcel(placement[end], 0.0, (end,)))
                if route.gradient:
                    back[end].append(Parcel(placement[end], 0.0, (route.source,)))
    for wire in wires(routes, placement):
        seconds = costs.message(wire.name, wire.nbytes, wire.source, wire.target)
        sent = ahead if wire.consumer is None else back
        sent[wire.stage].append(Parcel(wire.target, seconds, wire.readers))
    return Work(
        tuple(placement),
        max(placement) + 1,
        costs.seconds[Kind.FORWARD],
        costs.seconds[Kind.INPUT_GRAD],
        costs.seconds[Kind.WEIGHT_GRAD],
        costs.seconds[Kind.BACKWARD],
        costs.seconds[Kind.RECOMPUTE],
        tuple(map(tuple, ahead)),
        tuple(map(tuple, back)),
        costs.saved,
        costs.weight_saved,
        costs.recipe,
        tuple(again) if again else (False,) * n_stages,
        split,
    )
