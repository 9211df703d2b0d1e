"""A plan: the stage of every node, the device of every stage, and the route of every value that crosses stages.

The text form is JSON (`to_json`, `from_json`); the verifier is `verifiers/plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pipecompile.errors import PlanError
from pipecompile.ir import Route
from pipecompile.ir.candidates import Considered
from pipecompile.ir.plan_figures import figure_faults
from pipecompile.ir.views import html_of
from pipecompile.text.input_checks import file_path, json_text, place_text
from pipecompile.text.shown_value import shown
from pipecompile.text.text_file import load_text, save_text
from pipecompile.text.units import counted

__all__ = ["DAMAGED", "Plan", "StageSummary", "StepSummary"]

FORMAT = "pipecompile.plan/1"
"""The name of the file format, not of a module: it stays as it is when modules move."""

DAMAGED = "the plan is damaged"
"""First words of the error for a plan whose lists or figures contradict each other."""


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One row of the table that `print(pipe)` shows. Seconds and bytes are for one micro-batch.

    first, last          names of the first and the last module
    parameters           number of scalars
    memory               peak bytes of the stage in a step
    state_bytes          bytes held throughout: parameters with gradients and optimizer state, and buffers
    saved_bytes          bytes that autograd saves for the backward
    received_bytes       bytes received from other stages and kept until the backward, beside the saved ones
    sent_bytes           bytes sent to other stages
    forced               constraints of the user on this stage
    weight               seconds of `backward` that W can do; None if unknown: half of `backward`
    dividing             seconds that I and W together take beyond `backward`
    weight_saved_bytes   bytes kept between I and W; None if unknown: as many as before I
    flops                FLOPs of the forward; 0 if unknown
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
    flops: float = 0.0

    @property
    def held_bytes(self) -> float:
        """Return the bytes that a micro-batch occupies from F to B or I."""
        return self.saved_bytes + self.received_bytes

    @property
    def weight_grad(self) -> float:
        """Return the seconds of W."""
        return self.backward / 2 if self.weight is None else self.weight

    @property
    def input_grad(self) -> float:
        """Return the seconds of I."""
        return max(self.backward + self.dividing - self.weight_grad, 0.0)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The simulated step of the cut that was chosen, beside that of other cuts.

    `seconds` is the step of the chosen cut. No cut has a step below `lower_bound` seconds. `compared` is the number of cuts that
    were simulated. `first_seconds` is the step of the first of these, the cut with the fastest slowest stage, and
    `first_bottleneck` the bottleneck of that cut, in seconds.
    """

    seconds: float
    lower_bound: float
    compared: int
    first_seconds: float
    first_bottleneck: float

    @property
    def gap(self) -> float:
        """Return the relative distance of the step to its lower bound."""
        return (self.seconds - self.lower_bound) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The partitioner's decision as data.

    `stage_of` has every compute node. `placement[s]` is the index in `devices` for stage s. `graph` is the traced graph
    of the plan, one line per node, and `fingerprint` is the hash of these lines. `bottleneck` and `lower_bound` are
    seconds of the slowest stage for one micro-batch; `unforced` is the bottleneck of the cut without the user's
    constraints. `recompute` has a flag per stage, if the solver chose the recomputed stages. `considered` lists the
    candidates, if the number of micro-batches or the schedule was chosen by search. `status` says whether the bottleneck
    is proven to be the least; `step` has the step under the schedule, with a bound of its own. `samples` is the size of the
    micro-batch that all figures are for, None if unknown; they stay when a plan is used with another.
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
    step: StepSummary | None = None
    samples: int | None = None
    format: str = FORMAT

    @property
    def gap(self) -> float:
        """Return the relative distance of the bottleneck to its lower bound."""
        return (self.bottleneck - self.lower_bound) / self.bottleneck if self.bottleneck else 0.0

    @property
    def price(self) -> float | None:
        """Return the fraction by which the user's constraints slow down the slowest stage; None without constraints."""
        if self.unforced is None:
            return None
        return max(self.bottleneck / self.unforced - 1.0, 0.0) if self.unforced else 0.0

    def on(self, devices: Sequence[str]) -> Plan:
        """Return the plan on as many other devices, such as CPUs in the place of GPUs; the figures stay those of its own devices.

        A plan for another number of devices, or that names others, is returned as it is.
        """
        names = tuple(devices)
        if names == self.devices or len(names) != len(self.devices) or not {*self.placement} <= {*range(len(names))}:
            return self
        rows = zip(self.stages, self.placement, strict=False)
        return replace(self, devices=names, stages=tuple(replace(row, device=names[device]) for row, device in rows))

    def __repr__(self) -> str:
        figures = f"bottleneck={self.bottleneck:.3g} s, gap={self.gap:.1%}, {self.status}"
        return f"Plan(n_stages={self.n_stages}, devices={self.devices}, {figures})"

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "") -> Plan:
        """Return the plan whose `to_json` is `text`. Raise PlanError naming the place in the file; execute nothing."""
        text, where = json_text(text), place_text(where)
        try:
            plan: Plan = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise PlanError(
                "this is not a plan", where=where, why=str(error), hint="write one with pipe.plan.save(path)"
            ) from None
        if plan.format != FORMAT:
            raise PlanError(f"the plan has format {shown(plan.format)}, this version reads {FORMAT!r}", where=where)
        _check_lists(plan, where)
        return plan

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file. Raise InputError if it cannot be written."""
        save_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file. Raise PlanError if the file is missing or damaged."""
        source = file_path("path", path)
        hint = f"compile without plan=, then pipe.plan.save({str(source)!r})"
        return cls.from_json(load_text(source, "plan", PlanError, hint), where=str(source))


def _check_lists(plan: Plan, where: str) -> None:
    """Raise PlanError for a list per stage with another number of entries, for stages or devices that there are not, and for figures
    that contradict each other.
    """
    lengths = [("placement", len(plan.placement)), ("stages", len(plan.stages)), ("recompute", len(plan.recompute))]
    why = [
        f"{name} has {counted(n, 'entry')}" for name, n in lengths if n != plan.n_stages and (n or name != "recompute")
    ]
    why += [f"entry {s} of stages is stage {row.stage}" for s, row in enumerate(plan.stages) if row.stage != s]
    why += [
        f"placement has device {d} for stage {s}"
        for s, d in enumerate(plan.placement)
        if not 0 <= d < len(plan.devices)
    ]
    why = why or list(figure_faults(plan))
    if why:
        counts = f"n_stages is {plan.n_stages}, with {counted(len(plan.devices), 'device')}"
        hint = "a plan as pipe.plan.save(path) writes it; pin= and split_before= of compile move operations"
        raise PlanError(f"{DAMAGED}: {counts}", where=where, why="; ".join(why[:5]), hint=hint)
