"""All schedules by name, and how many stages each wants on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.schedules.dualpipev import build_dualpipev
from pipecompile.schedules.eager_1f1b import build_eager_1f1b
from pipecompile.schedules.forward import build_forward
from pipecompile.schedules.gpipe import build_gpipe
from pipecompile.schedules.interleaved import build_interleaved
from pipecompile.schedules.interleaved_zb import build_interleaved_zb
from pipecompile.schedules.looped_bfs import build_looped_bfs
from pipecompile.schedules.one_f_one_b import build_one_f_one_b
from pipecompile.schedules.v_half import build_v_half
from pipecompile.schedules.v_min import build_v_min
from pipecompile.schedules.zb_h1 import build_zb_h1
from pipecompile.schedules.zb_h2 import build_zb_h2
from pipecompile.schedules.zbv import build_zbv

__all__ = ["CATALOGUE", "Builder", "Entry", "register_schedule"]

Builder = Callable[[int, int, int], Schedule]
"""(n_stages, n_microbatches, n_devices), all checked, to a schedule."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A builder, and the number of stages that it puts on a device; None when any number will do."""

    build: Builder
    chunks: int | None = None

    def devices(self, n_stages: int) -> int:
        """How many devices it takes when nobody says."""
        return max(1, n_stages // (self.chunks or 1))

    def suits(self, n_stages: int, n_devices: int) -> bool:
        """Can it deal so many stages to so many devices?"""
        return n_stages == (self.chunks or n_stages // n_devices) * n_devices


CATALOGUE: dict[str, Entry] = {
    "gpipe": Entry(build_gpipe),
    "1f1b": Entry(build_one_f_one_b, 1),
    "eager-1f1b": Entry(build_eager_1f1b, 1),
    "interleaved": Entry(build_interleaved),
    "looped-bfs": Entry(build_looped_bfs),
    "zb-h1": Entry(build_zb_h1, 1),
    "zb-h2": Entry(build_zb_h2, 1),
    "interleaved-zb": Entry(build_interleaved_zb),
    "zbv": Entry(build_zbv, 2),
    "v-half": Entry(build_v_half, 2),
    "v-min": Entry(build_v_min, 2),
    "dualpipev": Entry(build_dualpipev, 2),
    "forward": Entry(build_forward),
}


def register_schedule(name: str, build: Builder, *, chunks: int | None = None) -> None:
    """Make `build_schedule(name, ...)` and `compile(schedule=name)` know a builder of your own.

    `build(n_stages, n_microbatches, n_devices)` returns a Schedule; `chunks` is the number of stages that it puts on a
    device, None when any number that divides will do. Raises ScheduleError when the name is taken.
    """
    if name in CATALOGUE:
        raise ScheduleError(f"a schedule is called {name!r} already", hint="another name")
    CATALOGUE[name] = Entry(build, chunks)
