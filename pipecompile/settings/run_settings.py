"""Options of a run: its schedule, recomputation, offloading, dispatch and caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import Program, Route, Schedule
from pipecompile.ir.routes import Sums
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.parameters.meta_init import Source
from pipecompile.passes.checkpointing import Checkpoint
from pipecompile.passes.user_passes import UserPass
from pipecompile.schedules import CATALOGUE, Builder, build_schedule
from pipecompile.settings.machine_settings import default_device_count
from pipecompile.settings.value_checks import Group, choice, entries, flag, refusal, whole_number
from pipecompile.text.input_checks import near
from pipecompile.text.shown_value import shown

__all__ = ["RunSettings", "built_schedule", "load_schedule"]

_MODES = ("never", "always", "except_last", "auto")


def load_schedule(schedule: Any) -> str | Schedule | Builder:
    """Return a Schedule, a builder or a name of the catalogue, or read the schedule in a .csv or the program in a .txt file. A
    Program becomes a WrittenProgram. Raise ScheduleError, also for a schedule of slices.
    """
    return _schedule("schedule", schedule)


def built_schedule(
    schedule: str | Builder, n_stages: int, n_microbatches: int, n_devices: int, routes: Sequence[Route] | None
) -> Schedule:
    """Return what the catalogue or a builder makes. Raise ScheduleError, with the number of devices that would fit, and for slices."""
    try:
        built = build_schedule(schedule, n_stages, n_microbatches, n_devices=n_devices, routes=routes)
    except ScheduleError as error:
        fitting = default_device_count(schedule, n_stages)
        if n_devices == fitting:
            raise
        hint = f"devices= with {fitting} {'entry' if fitting == 1 else 'entries'}, one per pipeline device; repeats are allowed"
        raise ScheduleError(error.what, why=error.why, hint=hint) from error.__cause__
    return built


def _schedule(name: str, value: Any) -> str | Schedule | Builder:
    if isinstance(value, Program):
        return WrittenProgram.of(value)
    if isinstance(value, Path) or (isinstance(value, str) and value.endswith((".csv", ".txt"))):
        value = (WrittenProgram if str(value).endswith(".txt") else Schedule).load(value)
    if isinstance(value, str) and value not in ("auto", *CATALOGUE):
        raise ScheduleError(
            f"{name}={shown(value)} is not known", why=f"known are {', '.join(map(repr, ('auto', *CATALOGUE)))}",
            hint=f"{name}={near(value, list(CATALOGUE))!r}, or the path of a .csv or .txt file",
        )  # fmt: skip
    if not isinstance(value, (str, Schedule)) and not callable(value):
        expected = "the name of a schedule, a Schedule, a Program, its file, nor a function that builds one"
        raise refusal(name, value, expected, hint=f'{name}="1f1b"', kind=ScheduleError)
    return value  # type: ignore[no-any-return]


def _checkpoint(name: str, value: Any) -> str | tuple[bool, ...]:
    """Return a mode, or a flag per stage. Raise ScheduleError."""
    if isinstance(value, str):
        if value not in _MODES:
            why = f"known are {', '.join(map(repr, _MODES))}, and a flag per stage"
            raise ScheduleError(f"{name}={shown(value)} is not known", why=why, hint=f"{name}={near(value, _MODES)!r}")
        return value
    try:
        return entries(name, value, _stage_flag, "a mode nor a flag per stage", f'{name}="always"')
    except InputError as error:
        raise ScheduleError(error.what, where=error.where, why=error.why, hint=error.hint) from None


def _stage_flag(name: str, value: Any) -> bool:
    """Return a flag; 0 and 1 count as flags here."""
    return bool(value) if type(value) is int and value in (0, 1) else flag(name, value)


def _passes(name: str, value: Any) -> tuple[UserPass, ...]:
    """Return passes of the user, functions among them placed last. Raise InputError."""
    hint = f'{name}=[pc.UserPass(function, after="slots")]'
    passes = entries(name, value, _pass, "a list of pc.UserPass or functions", hint)
    titles = [one.title for one in passes]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise InputError(
            f"two {name} are called {shown(twice)}", hint=f"pc.UserPass(function, {shown(twice + ' again')})"
        )
    return passes


def _pass(name: str, value: Any) -> UserPass:
    if not isinstance(value, UserPass) and not callable(value):
        raise refusal(name, value, "a pc.UserPass nor a function")
    return value if isinstance(value, UserPass) else UserPass(value)


def _check(name: str, value: Any) -> bool | str:
    """Return a bool, or "every:N" for a whole number N of at least 1."""
    if isinstance(value, str):
        every, _, count = value.partition(":")
        if every == "every" and count.isdecimal() and int(count) >= 1:
            return value
        raise refusal(name, value, 'True, False, or "every:N"', hint=f'{name}="every:1000"')
    return flag(name, value)


def _backend(name: str, value: Any) -> bool | str:
    return value if isinstance(value, str) else flag(name, value)


def _graphs(name: str, value: Any) -> bool | str:
    """Return a bool, or "step"."""
    if isinstance(value, str) and value != "step":
        raise refusal(name, value, 'True, False, or "step"', hint=f'{name}="step"')
    return value if isinstance(value, str) else flag(name, value)


@dataclass(frozen=True, kw_only=True)
class RunSettings(Group):
    """Schedule, recomputation, offloading, dispatch, sums of gradients, lost copies, passes, compilation of stages, number of
    recordings, and initial values of a model on meta.
    """

    schedule: Annotated[str | Schedule | Builder, _schedule]
    checkpoint: Annotated[Checkpoint, _checkpoint]
    restored: Annotated[int, whole_number(2)]
    offload: Annotated[bool, flag]
    reshard_after_forward: Annotated[bool, flag] = False
    lost_copies: Annotated[str, choice("raise", "continue")] = "raise"
    dispatch: Annotated[str, choice("auto", "inline", "threads")]
    gradient_sums: Annotated[Sums, choice("eager", "device")]
    compile_stages: Annotated[bool | str, _backend]
    cuda_graphs: Annotated[bool | str, _graphs]
    check: Annotated[bool | str, _check]
    cache_size: Annotated[int, whole_number(16)]
    progress: Annotated[bool, flag]
    passes: Annotated[tuple[UserPass, ...], _passes]
    init: tuple[Source, ...]

    @property
    def check_period(self) -> float:
        """The number of mini-batches from one check of a recording to the next; infinite if there is one check."""
        return float(self.check.partition(":")[2]) if isinstance(self.check, str) else math.inf
