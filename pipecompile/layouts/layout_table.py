"""The rows of a plan for a cluster, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from pipecompile.layouts.enumeration import Layout
from pipecompile.layouts.hardware import Cluster
from pipecompile.layouts.memory_kinds import DeviceBytes
from pipecompile.text.units import BYTES, SECONDS, Unit, counted, fit, written

__all__ = ["ClusterPlan", "LayoutRow", "StepSeconds"]


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step: the all-gather of shards, forwards and backwards, what of the reductions is not beside them, the optimizer."""

    gather: float
    pipeline: float
    reduction: float
    optimizer: float

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return self.gather + self.pipeline + self.reduction + self.optimizer


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """A layout with its best schedule, micro-batches and recomputation.

    `n_stages` stages; `n_microbatches` micro-batches of `samples` samples in each copy; `recompute` has a flag per stage. `seconds`
    are those of the step by part, `lower_bound` those that a step of this layout needs at least, whatever its cut and schedule.
    `memory` is that of the fullest device, and `missing` the bytes that it lacks, 0 if the layout fits. `inputs` are the arguments
    of `plan_for` that the line of `compile` repeats.
    """

    layout: Layout
    n_stages: int
    schedule: str
    n_microbatches: int
    samples: int
    recompute: tuple[bool, ...]
    seconds: StepSeconds
    lower_bound: float
    memory: DeviceBytes
    missing: float
    optimizer: str | None = None
    inputs: str = "example_args=(x,)"

    def __repr__(self) -> str:
        sizes = f"pp={self.layout.pp}, dp={self.layout.dp}, dp_shard={self.layout.dp_shard}, schedule={self.schedule!r}"
        figures = f"n_microbatches={self.n_microbatches}, seconds={self.seconds.total:.3g}, fits={self.fits}"
        return f"LayoutRow({sizes}, {figures})"

    @property
    def fits(self) -> bool:
        """Whether the fullest device holds all that it must."""
        return not self.missing

    @property
    def line(self) -> str:
        """The call of `compile` for this row, with the mesh of all ranks. Its inputs are the part of the mini-batch that a copy steps with."""
        sizes, names = tuple(self.layout.mesh.values()), tuple(self.layout.mesh)
        mesh = f'init_device_mesh("cuda", {sizes}, mesh_dim_names={_quoted(names)})'
        words = [f"pc.compile(model, {self.n_stages}", self.inputs, "loss_fn=loss_fn", f"mesh={mesh}"]
        words.append(f"n_microbatches={self.n_microbatches}")
        words.append(f'schedule="{self.schedule}"')
        if any(self.recompute):
            words.append(f"checkpoint={_flags(self.recompute)}")
        if self.optimizer is not None:
            words.append(f'optimizer="{self.optimizer}"')
        return ", ".join(words) + ")"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The layouts of a cluster for a step of `samples` samples: those that fit by their simulated step, then those that do not.

    `str` is a table, followed by the `compile` line of each row that fits.
    """

    model: str
    cluster: Cluster
    samples: int
    rows: tuple[LayoutRow, ...]

    @property
    def best(self) -> LayoutRow | None:
        """The row with the shortest step; None if nothing fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    @property
    def caption(self) -> str:
        """The heading: model, batch, cluster, and how many layouts fit."""
        fitting = sum(row.fits for row in self.rows)
        return (
            f"{self.model}, {counted(self.samples, 'sample')} a step on {self.cluster}, kernels at {self.cluster.reached:.0%} "
            f"of the data sheet: {counted(len(self.rows), 'layout')}, {fitting} fit{'s' * (fitting == 1)}"
        )

    def __repr__(self) -> str:
        return f"ClusterPlan(n_layouts={len(self.rows)}, best={self.best!r})"

    def __str__(self) -> str:
        columns = layout_columns(self.rows)
        cells = [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]
        widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        fitting = [f"{number + 1}  {row.line}" for number, row in enumerate(self.rows) if row.fits]
        return "\n".join([self.caption, lines[0], "─" * max(map(len, lines)), *lines[1:], "", *fitting])

    def _repr_html_(self) -> str:
        columns = layout_columns(self.rows)
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        rows = zip(*columns.values(), strict=True)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        line = "" if self.best is None else f"<pre>{escape(self.best.line)}</pre>"
        return f"<p>{escape(self.caption)}</p><table><tr>{head}</tr>{body}</table>{line}"


def layout_columns(rows: Sequence[LayoutRow]) -> dict[str, list[str]]:
    """Return header -> cells, without columns that are empty. A column has one unit."""
    steps = [row.seconds.total for row in rows]
    step, held = fit(SECONDS, steps), fit(BYTES, [row.memory.total for row in rows])
    kinds = ("parameters", "gradients", "optimizer", "activations")
    columns = {
        "": [str(number + 1) if row.fits else "-" for number, row in enumerate(rows)],
        "mesh": [str(row.layout) for row in rows],
        "schedule": [row.schedule for row in rows],
        "micro-batches": [f"{row.n_microbatches} of {row.samples}" for row in rows],
        "recomputed": [f"{sum(row.recompute)} of {row.n_stages}" if any(row.recompute) else "" for row in rows],
        f"step {step.name}": _numbers(steps, step),
        "bound": _numbers([row.lower_bound for row in rows], step),
        f"memory {held.name}": _numbers([row.memory.total for row in rows], held),
        **{kind: _numbers([getattr(row.memory, kind) for row in rows], held) for kind in kinds},
        "lacks": ["" if row.fits else written(BYTES, row.missing) for row in rows],
    }
    return {header: cells for header, cells in columns.items() if any(cells)}


def _numbers(values: Sequence[float], unit: Unit) -> list[str]:
    largest = max(values, default=0.0)
    return [unit.format(value, largest) for value in values]


def _quoted(names: Sequence[str]) -> str:
    words = ", ".join(f'"{name}"' for name in names)
    return f"({words},)" if len(names) == 1 else f"({words})"


def _flags(recompute: Sequence[bool]) -> str:
    """Return the flags as a user writes them, runs of equal ones as products."""
    if all(recompute):
        return '"always"'
    runs = [(flag, len(list(run))) for flag, run in groupby(recompute)]
    return " + ".join(f"[{flag}] * {length}" for flag, length in runs)
