"""The data of an HTML report's "what if" section: costs by number of stages, and schedules as text.

`planning/alternatives.py` computes the data, `show/html_report.py` writes them into the page, and the page simulates them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Order", "RouteCosts", "StageCosts", "WhatIf"]


@dataclass(frozen=True, slots=True)
class RouteCosts:
    """Costs of one value that crosses between stages, per micro-batch: `nbytes` bytes, and `seconds` to another device.

    `source` and `ends` are stages, -1 for the host. With `gradient` each end sends a gradient of the same size back.
    """

    source: int
    ends: tuple[int, ...]
    nbytes: float
    gradient: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of one micro-batch per stage, and of what crosses between the stages.

    `forward`, `backward`, `input_grad` and `weight_grad` are seconds. `saved` is the bytes from F to B or I, `kept` those from I to W.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    saved: tuple[float, ...]
    kept: tuple[float, ...]
    routes: tuple[RouteCosts, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule as text: `csv` has the form of `Schedule.to_csv`, `placement[s]` is the device of stage s."""

    name: str
    devices: int
    microbatches: int
    placement: tuple[int, ...]
    csv: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Everything that the report's page simulates.

    `costs` maps a number of stages to costs of one micro-batch, where a mini-batch has `microbatches` micro-batches.
    `orders` are the schedules to choose from; `own`, the schedule of the report itself, is the first. `overlaps` says that
    copies run beside compute, so that values live longer.
    """

    own: Order
    microbatches: int
    costs: dict[int, StageCosts]
    orders: tuple[Order, ...]
    overlaps: bool = False
