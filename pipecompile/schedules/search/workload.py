"""Workload of a schedule search: per stage the seconds and bytes of one micro-batch, and its transfers to other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipecompile.ir import HOST, Kind, Route
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.from_schedule import device_transfers

__all__ = [
    "Transfer",
    "Workload",
    "make_workload",
    "senders",
    "unit_workload",
    "value_bytes",
    "with_free_recompute",
    "with_tolerance",
    "without_values",
]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message of one action to one device: its duration in seconds, and the stages on that device that read it.

    Messages of one stage with the same `value` carry the same value, which has `nbytes` bytes (0 where values do not count).
    """

    device: int
    seconds: float
    stages: tuple[int, ...]
    value: str = ""
    nbytes: float = 0.0


Transfers = tuple[tuple[Transfer, ...], ...]
"""Per stage, the transfers that its action sends."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Costs of one micro-batch, per stage: seconds by kind of action, bytes (or another unit of memory), and transfers.

    The forward of stage s sends `forward_transfers[s]`, its backward `gradient_transfers[s]`; to stages on the same device they
    take 0 seconds. A forward saves `saved[s]`, of which a split backward leaves `weight_saved[s]` until W. If stage s
    `is_recomputed`, its forward keeps only `recipe[s]`, and R restores `saved[s]`. `split`: backwards may be split into I and W.
    """

    placement: tuple[int, ...]
    n_devices: int
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...]
    forward_transfers: Transfers
    gradient_transfers: Transfers
    saved: tuple[float, ...]
    weight_saved: tuple[float, ...]
    recipe: tuple[float, ...]
    is_recomputed: tuple[bool, ...]
    split: bool = True

    @property
    def n_stages(self) -> int:
        return len(self.placement)


def unit_workload(placement: Sequence[int]) -> Workload:
    """Return a chain in which every F, I, W and R takes 1 second, every transfer 0 seconds, and a forward saves 1 byte until W."""
    n_stages = len(placement)
    ones, twos, stages = (1.0,) * n_stages, (2.0,) * n_stages, range(n_stages)
    forward = tuple((Transfer(placement[s + 1], 0.0, (s + 1,)),) if s + 1 < n_stages else () for s in stages)
    gradient = tuple((Transfer(placement[s - 1], 0.0, (s - 1,)),) if s else () for s in stages)
    none = (False,) * n_stages
    return Workload(
        tuple(placement), max(placement) + 1, ones, ones, ones, twos, ones, forward, gradient, ones, ones, ones, none
    )


def without_values(workload: Workload) -> Workload:
    """Return the workload with values of 0 bytes, for memory that counts micro-batches."""

    def emptied(sent: Transfers) -> Transfers:
        return tuple(tuple(replace(transfer, nbytes=0.0) for transfer in each) for each in sent)

    forward, gradient = emptied(workload.forward_transfers), emptied(workload.gradient_transfers)
    return replace(workload, forward_transfers=forward, gradient_transfers=gradient)


def with_free_recompute(workload: Workload) -> Workload:
    """Return a workload whose schedules are no slower than those that recompute any of the stages: recomputation takes no time."""
    saved = tuple(map(min, workload.saved, workload.recipe))
    return replace(workload, saved=saved, is_recomputed=(False,) * workload.n_stages)


def senders(sent: Transfers, n_stages: int) -> list[list[tuple[int, float]]]:
    """Return, per stage, (sender, seconds of the transfer) of all that it receives."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(n_stages)]
    for s, transfers in enumerate(sent):
        for transfer in transfers:
            for stage in transfer.stages:
                found[stage].append((s, transfer.seconds))
    return found


def value_bytes(workload: Workload) -> list[float]:
    """Return, per stage, the bytes of the values that its forward writes, and of those that it received from other devices."""
    totals = [0.0] * workload.n_stages
    for s, transfers in enumerate(workload.forward_transfers):
        totals[s] += sum({transfer.value: transfer.nbytes for transfer in transfers}.values())
        for transfer in transfers:
            if transfer.device != workload.placement[s]:
                for reader in transfer.stages:
                    totals[reader] += transfer.nbytes
    return totals


def with_tolerance(capacity: float) -> float:
    """Return `capacity` with a relative tolerance of 1e-12, so that rounding of an equal sum does not exceed it."""
    return capacity * (1 + 1e-12)


def make_workload(
    placement: Sequence[int],
    routes: Sequence[Route],
    costs: Costs,
    *,
    is_recomputed: Sequence[bool] | None = None,
    split: bool = True,
) -> Workload:
    """Return the workload of `routes` under `costs`; `is_recomputed` has a flag per stage, by default all False."""
    forward, gradient = _transfers(placement, routes, costs)
    seconds = costs.seconds
    return Workload(
        tuple(placement),
        max(placement) + 1,
        seconds[Kind.FORWARD],
        seconds[Kind.INPUT_GRAD],
        seconds[Kind.WEIGHT_GRAD],
        seconds[Kind.BACKWARD],
        seconds[Kind.RECOMPUTE],
        forward,
        gradient,
        costs.saved,
        costs.weight_saved,
        costs.recipe,
        tuple(is_recomputed) if is_recomputed else (False,) * len(placement),
        split,
    )


def _transfers(placement: Sequence[int], routes: Sequence[Route], costs: Costs) -> tuple[Transfers, Transfers]:
    """Return the transfers that forwards and that backwards send, per stage."""
    forward: list[list[Transfer]] = [[] for _ in placement]
    gradient: list[list[Transfer]] = [[] for _ in placement]
    for route in routes:
        for end in route.consumers if route.source != HOST else ():
            if end != HOST and placement[end] == placement[route.source]:
                forward[route.source].append(Transfer(placement[end], 0.0, (end,), route.value, route.nbytes))
                if route.gradient:
                    back = Transfer(placement[end], 0.0, (route.source,), route.value, route.nbytes)
                    gradient[end].append(back)
    for transfer in device_transfers(routes, placement):
        seconds = costs.message(transfer.name, transfer.nbytes, transfer.source, transfer.target)
        sent = forward if transfer.consumer is None else gradient
        sent[transfer.stage].append(
            Transfer(transfer.target, seconds, transfer.readers, transfer.name, transfer.nbytes)
        )
    return tuple(map(tuple, forward)), tuple(map(tuple, gradient))
