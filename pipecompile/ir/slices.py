"""Slices: a micro-batch is divided along its sequence, and each slice goes through the stages by itself.

    0F0.0 0F0.1 0B0.1 0B0.0          2 slices of micro-batch 0: forwards in the order of the sequence, backwards against it

In a causal model the forward of a slice reads the keys and values of the slices before it, and its backward adds to their gradients.
So on every stage F of slice s needs F of slice s - 1 of the same micro-batch, and B or I of slice s needs B or I of slice s + 1.
W of slice s needs I of slice s alone, which has the gradients of the keys and values of slice s from all later slices. R needs F alone:
what a recomputed forward keeps includes the keys and values that it reads. OFFLOAD moves the keys and values of its slice too. So it
needs F of the last slice, and B or I of the last slice needs RELOAD of every slice.

A program numbers the slices of all micro-batches from 0, micro-batch by micro-batch: of 2 slices, `0F3` is `0F1.1`.

Li et al., "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models", ICML 2021 (arXiv 2102.07988);
Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training", 2024 (arXiv 2406.03488).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pipecompile.errors import ScheduleError
from pipecompile.ir.action import NO_SLICE, SHARDING, Action
from pipecompile.text.input_checks import checked_count
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = [
    "WHOLE",
    "check_whole",
    "checked_slices",
    "count_text",
    "first_slice",
    "in_slices",
    "shape_text",
    "title_of",
    "unit_text",
]


WHOLE = "it takes schedules of whole micro-batches"


class _Sliced(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def n_stages(self) -> int: ...
    @property
    def n_devices(self) -> int: ...
    @property
    def n_microbatches(self) -> int: ...
    @property
    def n_slices(self) -> int: ...


def checked_slices(rows: Sequence[Sequence[Action]], n_microbatches: int) -> int:
    """Return the number of slices per micro-batch; 1 if no action has a slice.

    Raise ScheduleError if some actions have a slice and others have none, if a slice is missing everywhere, or if there are fewer
    actions than slices.
    """
    first = {a.slice: a for row in reversed(rows) for a in reversed(row) if a.kind not in SHARDING}
    if set(first) == {NO_SLICE}:
        return 1
    whole = first.pop(NO_SLICE, None)
    if whole is not None:
        hint = "a slice for every action, as in 0F0.0,0F0.1,0B0.1,0B0.0, or for none"
        raise ScheduleError(
            f"{first_slice(rows)} has a slice and {whole} has none", why="all or none are divided", hint=hint
        )
    n_slices = max(first) + 1
    checked_count(n_slices * n_microbatches, sum(map(len, rows)), "slices of micro-batches")
    if n_slices == 1:
        what, plain = first[0], Action(first[0].stage, first[0].kind, first[0].microbatch)
        raise ScheduleError(f"{what} is of the only slice", why="one slice is the whole micro-batch", hint=str(plain))
    if len(first) < n_slices:
        missing = next(number for number in range(n_slices) if number not in first)
        raise ScheduleError(
            f"no action is of slice {missing}",
            where=f"{first[n_slices - 1]}",
            why=f"slices 0 to {n_slices - 1} are expected",
        )
    return n_slices


def unit_text(unit: int, n_slices: int) -> str:
    """Return the text of unit `unit` as actions have it: `3`, or of 2 slices per micro-batch `1.1`."""
    return str(unit) if n_slices == 1 else "{}.{}".format(*divmod(unit, n_slices))


def in_slices(action: Action, n_slices: int) -> Action:
    """Return an action on a number among the slices of all micro-batches as one on a slice of a micro-batch."""
    if n_slices == 1 or action.kind in SHARDING:
        return action
    return Action(action.stage, action.kind, *divmod(action.microbatch, n_slices))


def count_text(schedule: _Sliced) -> str:
    """Return `8 micro-batches`, or `8 micro-batches of 4 slices`."""
    slices = "" if schedule.n_slices == 1 else f" of {counted(schedule.n_slices, 'slice')}"
    return counted(schedule.n_microbatches, "micro-batch") + slices


def shape_text(schedule: _Sliced) -> str:
    """Return `4 stages on 2 devices, 8 micro-batches`."""
    places = f"{counted(schedule.n_stages, 'stage')} on {counted(schedule.n_devices, 'device')}"
    return f"{places}, {count_text(schedule)}"


def first_slice(rows: Iterable[Iterable[Action]]) -> Action | None:
    """Return the first action on a slice; None if all are on whole micro-batches."""
    return next((action for row in rows for action in row if action.slice != NO_SLICE), None)


def check_whole(schedule: _Sliced, what: str, *, why: str = WHOLE, hint: str = "") -> None:
    """Raise ScheduleError for a schedule of slices, which `what` does not support. The default hint builds one of whole micro-batches."""
    if schedule.n_slices != 1:
        name, stages, devices = shown(schedule.name), schedule.n_stages, schedule.n_devices
        whole = f'"1f1b", {stages}' if stages == devices else f'"interleaved", {stages}'
        count = f"{schedule.n_microbatches}" + f", n_devices={devices}" * (stages != devices)
        raise ScheduleError(
            f"schedule {name} has {counted(schedule.n_slices, 'slice')} per micro-batch, and {what}",
            why=why,
            hint=hint or f"pc.build_schedule({whole}, {count})",
        )


def title_of(schedule: _Sliced) -> str:
    """Return the name of a schedule and its counts: "1f1b, 4 stages on 4 devices, 8 micro-batches"."""
    return f"{schedule.name}, {shape_text(schedule)}"
