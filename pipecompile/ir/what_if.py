"""The data of an HTML report's "what if" section: costs by number of stages, and schedules as text.

`planning/what_if.py` computes the data, `show/html_report.py` writes them into the page, and the page simulates them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Order", "StageCosts", "WhatIf"]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of one micro-batch per stage.

    `forward`, `input_grad` and `weight_grad` are seconds, `saved` is bytes. `transfer[s]` is the seconds for all values
    that stage s sends to later stages.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    saved: tuple[float, ...]
    transfer: tuple[float, ...]


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
    `orders` are the schedules to choose from; `own`, the schedule of the report itself, is the first.
    """

    own: Order
    microbatches: int
    costs: dict[int, StageCosts]
    orders: tuple[Order, ...]
