"""Catalogue of schedules by name, with the number of stages that each places on a device; `build_schedule` looks them up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipecompile.errors import PipecompileError, ScheduleError, described
from pipecompile.ir import Route, Schedule
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.routes import stages_after
from pipecompile.schedules.building_blocks import DEFAULT_SLICES, chain_after, check_cells
from pipecompile.schedules.checkpoint_window import build_checkpoint_window
from pipecompile.schedules.chimera import build_chimera
from pipecompile.schedules.dualpipe import build_dualpipe
from pipecompile.schedules.dualpipev import build_dualpipev
from pipecompile.schedules.dualpipev_overlap import build_dualpipev_overlap
from pipecompile.schedules.eager_1f1b import build_eager_1f1b
from pipecompile.schedules.forward import build_forward
from pipecompile.schedules.gpipe import build_gpipe
from pipecompile.schedules.gpipe_remat import build_gpipe_remat
from pipecompile.schedules.hanayo import build_hanayo
from pipecompile.schedules.interleaved import build_interleaved
from pipecompile.schedules.interleaved_zb import build_interleaved_zb
from pipecompile.schedules.llama3 import build_llama3
from pipecompile.schedules.looped_bfs import build_looped_bfs
from pipecompile.schedules.mario import build_mario
from pipecompile.schedules.one_f_one_b import build_one_f_one_b
from pipecompile.schedules.ooo_backprop import build_ooo_backprop
from pipecompile.schedules.po_full import build_po_full
from pipecompile.schedules.po_half import build_po_half
from pipecompile.schedules.seq1f1b import build_seq1f1b
from pipecompile.schedules.seq1f1b_interleaved import build_seq1f1b_interleaved
from pipecompile.schedules.sequential import build_sequential
from pipecompile.schedules.terapipe import build_terapipe
from pipecompile.schedules.two_stage_backprop import build_two_stage_backprop
from pipecompile.schedules.v_half import build_v_half
from pipecompile.schedules.v_min import build_v_min
from pipecompile.schedules.v_two_thirds import build_v_two_thirds
from pipecompile.schedules.zb_1p import build_zb_1p
from pipecompile.schedules.zb_2p import build_zb_2p
from pipecompile.schedules.zb_h1 import build_zb_h1
from pipecompile.schedules.zb_h2 import build_zb_h2
from pipecompile.schedules.zbv import build_zbv
from pipecompile.simulation.simulator import simulate
from pipecompile.text.input_checks import near
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted
from pipecompile.verifiers.routes import checked_routes
from pipecompile.verifiers.schedule import schedule_faults

__all__ = ["CATALOGUE", "Builder", "CatalogueEntry", "build_schedule", "compared_names", "register_schedule"]

Builder = Callable[..., Schedule]
"""(n_stages, n_microbatches, n_devices) -> schedule. The counts are checked before the call. A builder that goes by depth has a fourth
argument: per stage, the number of stages on the longest path after it.
"""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A builder, the number of stages that it places on a device (None if any number is possible), and whether its warm-up goes by
    the depth of stages in their DAG. The order of other builders is that of a chain, which is legal for every DAG.

    `compared` is False where another entry is as fast in as little memory, or where other options choose what is recomputed and
    offloaded, or where actions overlap: searches for the fastest schedule leave such an entry out.

    A builder with `has_slices` divides micro-batches along their sequence, into as many slices as its keyword `n_slices` says. One with
    `has_copies` places each stage several times.
    """

    build: Builder
    chunks: int | None = None
    by_depth: bool = False
    compared: bool = True
    has_slices: bool = False
    has_copies: bool = False

    def devices(self, n_stages: int) -> int:
        """Return the default number of devices for `n_stages` stages."""
        return max(1, n_stages // (self.chunks or 1))

    def suits(self, n_stages: int, n_devices: int) -> bool:
        """Return whether the builder can place `n_stages` stages on `n_devices` devices."""
        return n_stages == (self.chunks or n_stages // n_devices) * n_devices

    def schedule(
        self,
        n_stages: int,
        n_microbatches: int,
        n_devices: int,
        routes: Sequence[Route] | None = None,
        n_slices: int | None = None,
    ) -> Schedule:
        """Return the schedule of a chain, or of the DAG of stages that `routes` make.

        With several stages on a device the warm-up by depth may be too short for the DAG: then the order of a chain is returned.
        `n_slices` is for builders that have slices, whose default is None.
        """
        slices = {} if n_slices is None or not self.has_slices else {"n_slices": n_slices}
        chain = self.build(n_stages, n_microbatches, n_devices, **slices)
        after = stages_after(n_stages, routes) if routes is not None and self.by_depth else chain_after(n_stages)
        if routes is None or after == chain_after(n_stages):
            return chain
        schedule = self.build(n_stages, n_microbatches, n_devices, after)
        if schedule_faults(schedule, routes):
            return chain
        if (
            n_stages > n_devices
            and simulate(schedule, routes=routes).makespan > simulate(chain, routes=routes).makespan
        ):
            return chain
        return schedule


CATALOGUE: dict[str, CatalogueEntry] = {
    "gpipe": CatalogueEntry(build_gpipe),
    "1f1b": CatalogueEntry(build_one_f_one_b, 1, by_depth=True),
    "eager-1f1b": CatalogueEntry(build_eager_1f1b, 1, by_depth=True),
    "interleaved": CatalogueEntry(build_interleaved, by_depth=True),
    "looped-bfs": CatalogueEntry(build_looped_bfs),
    "zb-h1": CatalogueEntry(build_zb_h1, 1, by_depth=True),
    "zb-h2": CatalogueEntry(build_zb_h2, 1, by_depth=True),
    "interleaved-zb": CatalogueEntry(build_interleaved_zb, by_depth=True),
    "zbv": CatalogueEntry(build_zbv, 2),
    "v-half": CatalogueEntry(build_v_half, 2),
    "v-min": CatalogueEntry(build_v_min, 2),
    "dualpipev": CatalogueEntry(build_dualpipev, 2),
    "sequential": CatalogueEntry(build_sequential, compared=False),
    "gpipe-remat": CatalogueEntry(build_gpipe_remat, 1, compared=False),
    "ooo-backprop": CatalogueEntry(build_ooo_backprop, 1, compared=False),
    "2bp": CatalogueEntry(build_two_stage_backprop, 1, compared=False),
    "zb-1p": CatalogueEntry(build_zb_1p, 1, compared=False),
    "zb-2p": CatalogueEntry(build_zb_2p, 1, compared=False),
    "checkpoint-window": CatalogueEntry(build_checkpoint_window, 1, compared=False),
    "mario": CatalogueEntry(build_mario, 1, compared=False),
    "v-two-thirds": CatalogueEntry(build_v_two_thirds, 2, compared=False),
    "hanayo": CatalogueEntry(build_hanayo, compared=False),
    "chimera": CatalogueEntry(build_chimera, 1, compared=False, has_copies=True),
    "dualpipe": CatalogueEntry(build_dualpipe, 1, compared=False, has_copies=True),
    "llama3": CatalogueEntry(build_llama3, compared=False),
    "dualpipev-overlap": CatalogueEntry(build_dualpipev_overlap, 2, compared=False),
    "po-half": CatalogueEntry(build_po_half, 2, compared=False),
    "po-full": CatalogueEntry(build_po_full, compared=False),
    "seq1f1b": CatalogueEntry(build_seq1f1b, 1, compared=False, has_slices=True),
    "seq1f1b-interleaved": CatalogueEntry(build_seq1f1b_interleaved, compared=False, has_slices=True),
    "terapipe": CatalogueEntry(build_terapipe, compared=False, has_slices=True),
    "forward": CatalogueEntry(build_forward, compared=False),
}


def compared_names() -> list[str]:
    """Return the names that searches for the fastest schedule of a training step compare."""
    return [name for name, entry in CATALOGUE.items() if entry.compared]


def register_schedule(name: str, build: Builder, *, chunks: int | None = None) -> None:
    """Add a builder of your own to the catalogue, for `build_schedule(name, ...)` and `compile(schedule=name)`.

    `build(n_stages, n_microbatches, n_devices)` returns a Schedule. `chunks` is the number of stages that it places on a device;
    None if any number of stages that is a multiple of `n_devices` is possible. Raises ScheduleError if the name is taken, or
    `build` takes other arguments.
    """
    if not isinstance(name, str) or not callable(build):
        raise ScheduleError(
            f"{shown(name)} with {shown(build)} is not a name with a function", hint='register_schedule("mine", build)'
        )
    try:
        inspect.signature(build).bind(1, 1, 1)
    except (TypeError, ValueError) as error:
        raise ScheduleError(
            f"{shown(build)} cannot build a schedule: {error}",
            hint="def build(n_stages, n_microbatches, n_devices): ...",
        ) from None
    if name in CATALOGUE:
        raise ScheduleError(
            f"a schedule is called {shown(name)} already", hint=f"another name, such as {shown(name + '-2')}"
        )
    if name.strip() in ("", "auto") or name.endswith((".csv", ".txt")):
        why = "schedule= takes 'auto' for a search, and what ends in .csv or .txt for a file"
        raise ScheduleError(f"{shown(name)} cannot be the name of a schedule", why=why, hint="'mine'")
    if chunks is not None:
        _check_counts(chunks=chunks)
    CATALOGUE[name] = CatalogueEntry(partial(_built, build), chunks)


@without_collection
def build_schedule(
    schedule: str | Builder,
    n_stages: int,
    n_microbatches: int,
    *,
    n_devices: int | None = None,
    routes: Sequence[Route] | None = None,
    n_slices: int | None = None,
) -> Schedule:
    """Return the schedule of the catalogue with this name, or the schedule of a function (n_stages, n_microbatches, n_devices).

    A device gets several stages if `n_devices` is a fraction of `n_stages`; `placement` of the result has the device of each.
    By default, schedules in a V take half as many devices as stages, all others one device per stage. Values move along `routes`, by
    default a chain; stages that do not depend on each other run beside each other, and warm up by their depth. `n_slices` is the number
    of slices along the sequence of each micro-batch, for the schedules that have slices (default 4). Raises ScheduleError
    if the name is unknown or the schedule does not exist for these counts.
    """
    entry = _entry(schedule)
    _check_counts(n_stages=n_stages, n_microbatches=n_microbatches)
    _check_slices(schedule, entry, n_slices)
    check_cells(n_stages, n_microbatches, DEFAULT_SLICES if entry.has_slices and n_slices is None else n_slices or 1)
    n_devices = entry.devices(n_stages) if n_devices is None else n_devices
    _check_counts(n_stages=n_stages, n_microbatches=n_microbatches, n_devices=n_devices)
    _check_division(schedule if isinstance(schedule, str) else "the schedule", entry, n_stages, n_devices)
    routes = None if routes is None else checked_routes(routes, n_stages)
    return entry.schedule(n_stages, n_microbatches, n_devices, routes, n_slices)


def _entry(schedule: str | Builder) -> CatalogueEntry:
    if callable(schedule):
        return CatalogueEntry(partial(_built, schedule))
    if not isinstance(schedule, str) or schedule not in CATALOGUE:
        why = f"known are {', '.join(map(repr, CATALOGUE))}"
        raise ScheduleError(f"no schedule is called {shown(schedule)}", why=why, hint=repr(near(schedule, CATALOGUE)))
    return CATALOGUE[schedule]


def _built(build: Builder, *counts: Any) -> Schedule:
    """Return the schedule of a user function for (n_stages, n_microbatches, n_devices). Raise ScheduleError if it has none."""
    hint = "a function of (n_stages, n_microbatches, n_devices) that returns pipecompile.Schedule.from_rows(...)"
    try:
        schedule: object = build(*counts)
    except PipecompileError:
        raise
    except Exception as error:
        why = described(error)
        raise ScheduleError(f"schedule={shown(build)} failed for {counts}", why=why, hint=hint) from error
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"schedule={shown(build)} returned {shown(schedule)}, not a Schedule", hint=hint)
    _check_wish(build, schedule, counts)
    return schedule


def _check_wish(build: Builder, schedule: Schedule, wish: tuple[int, int, int]) -> None:
    """Raise ScheduleError for a schedule of other stages or micro-batches than those that the builder was called with."""
    for have, want, noun in ((schedule.n_stages, wish[0], "stage"), (schedule.n_microbatches, wish[1], "micro-batch")):
        if have != want:
            raise ScheduleError(
                f"schedule={shown(build)} returned a schedule of {counted(have, noun)} for {counted(want, noun)}",
                why=f"it was called with {wish}: n_stages, n_microbatches, n_devices",
                hint="a schedule of the counts that the function gets",
            )


def _check_counts(**counts: object) -> None:
    all_counts = ", ".join(f"{name}={shown(count)}" for name, count in counts.items())
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            why = f"the counts are {all_counts}"
            raise ScheduleError(f"{name} is not a whole number of at least 1", why=why, hint=f"{name}=4")


def _check_slices(schedule: str | Builder, entry: CatalogueEntry, n_slices: int | None) -> None:
    """Raise ScheduleError if `n_slices` is not a count, or if a schedule of whole micro-batches is to have several slices."""
    if n_slices is None:
        return
    _check_counts(n_slices=n_slices)
    if n_slices > 1 and not entry.has_slices:
        others = ", ".join(repr(name) for name, other in CATALOGUE.items() if other.has_slices)
        name = schedule if isinstance(schedule, str) else "the function"
        raise ScheduleError(f"{name} has no slices", why=f"n_slices={shown(n_slices)}", hint=f"one of {others}")


def _check_division(name: str, entry: CatalogueEntry, n_stages: int, n_devices: int) -> None:
    """Raise ScheduleError if devices would get different numbers of stages, or a number that the builder does not support."""
    if n_stages % n_devices:
        raise ScheduleError(
            f"{counted(n_stages, 'stage')} cannot be divided among {counted(n_devices, 'device')}",
            why="every device takes the same number of stages",
            hint=f"n_stages={shown(_multiple_near(n_stages, n_devices))} or n_devices={n_stages}",
        )
    if entry.chunks is not None and n_stages != entry.chunks * n_devices:
        others = [
            o for o, other in CATALOGUE.items() if other.chunks is None and (entry.has_slices or not other.has_slices)
        ]
        count = (
            f"n_stages={shown(entry.chunks * n_devices)}"
            if n_stages % entry.chunks
            else f"n_devices={n_stages // entry.chunks}"
        )
        raise ScheduleError(
            f"{name} runs {counted(entry.chunks, 'stage')} per device, "
            f"not {counted(n_stages, 'stage')} on {counted(n_devices, 'device')}",
            hint=f"{count}, or one of {', '.join(map(repr, others))}",
        )


def _multiple_near(count: int, factor: int) -> int:
    """Return the positive multiple of `factor` nearest to `count`."""
    return max(1, round(count / factor)) * factor
