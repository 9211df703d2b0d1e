"""A plan: which stage every node belongs to, which device every stage runs on, and the route of every crossing value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipecompile.errors import PlanError
from pipecompile.ir import Route
from pipecompile.ir.candidates import Considered
from pipecompile.ir.notebook_html import html_of

__all__ = ["Plan", "StageSummary"]

FORMAT = "pipecompile.ir.plan/1"


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One row of the table that `print(pipe)` shows. Seconds and bytes are for one micro-batch; `memory` is what the stage
    holds at most in a step, `state_bytes` what it holds always: parameters with gradients and optimizer state, and buffers.
    `forced` is what the user asked of it. `weight` is the part of `backward` that W can do; half of it when nobody knows;
    `dividing` is what I and W take together beyond `backward`,
    `received_bytes` what came from other stages and is held until the backward beside what is saved, and `weight_saved_bytes` what
    a micro-batch holds between I and W; as much as before when nobody knows.
    """

    stage: int
    device: str
    first: str
    last: str
    nodes: int
    parameters: int
    parameter_bytes: float
    forward: float
    backward: float
    saved_bytes: float
    sent_bytes: float
    skips_in: int
    skips_out: int
    memory: float = 0.0
    state_bytes: float = 0.0
    forced: tuple[str, ...] = ()
    weight: float | None = None
    dividing: float = 0.0
    received_bytes: float = 0.0
    weight_saved_bytes: float | None = None

    @property
    def held_bytes(self) -> float:
        """Of a micro-batch, from F to B or I."""
        return self.saved_bytes + self.received_bytes

    @property
    def weight_grad(self) -> float:
        """Seconds of W."""
        return self.backward / 2 if self.weight is None else self.weight

    @property
    def input_grad(self) -> float:
        """Seconds of I."""
        return max(self.backward + self.dividing - self.weight_grad, 0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """The partitioner's decision as data. `placement[s]` indexes `devices`; `stage_of` covers every compute node.

    `graph` is what it was made for, a line per node, `fingerprint` their hash. `unforced` is the bottleneck of the cut
    without what the user forced. `recompute`: which stages the solver has recompute, when that was left to it.
    `considered`: what was compared, when the number of micro-batches or the schedule was left open.
    """

    fingerprint: str
    n_stages: int
    devices: tuple[str, ...]
    placement: tuple[int, ...]
    stage_of: dict[str, int]
    routes: tuple[Route, ...]
    stages: tuple[StageSummary, ...]
    bottleneck: float
    lower_bound: float
    status: str
    method: str
    cost: str
    graph: tuple[str, ...] = ()
    unforced: float | None = None
    recompute: tuple[bool, ...] = ()
    considered: Considered | None = None
    format: str = FORMAT

    @property
    def gap(self) -> float:
        """How far the bottleneck may be above the least possible one, as a fraction of it."""
        return (self.bottleneck - self.lower_bound) / self.bottleneck if self.bottleneck else 0.0

    @property
    def price(self) -> float | None:
        """By how much what was forced makes the slowest stage slower, as a fraction; None when nothing was."""
        if self.unforced is None:
            return None
        return max(self.bottleneck / self.unforced - 1.0, 0.0) if self.unforced else 0.0

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "") -> Plan:
        """The inverse of `to_json`. Raises PlanError naming the place in the file; never executes anything."""
        try:
            plan = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise PlanError(
                "this is not a plan", where=where, why=str(error), hint="write one with pipe.plan.save(path)"
            ) from None
        if plan.format != FORMAT:
            raise PlanError(f"the plan has format {plan.format!r}, this version reads {FORMAT!r}", where=where)
        return plan

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan. Raises PlanError when the file is missing or damaged."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise PlanError("the plan cannot be read", where=str(path), why=str(error)) from None
        return cls.from_json(text, where=str(path))
