"""Passes of users among those of the lowering, placed by name, verified and timed like ours.

    compile(passes=[pc.UserPass(mine, before="compute"), pc.UserPass(other, after="slots")])

    schedule ─ (recompute) ─ mine ─ compute ─ transfers ─ meetings ─ (ties) ─ liveness ─ (lingering) ─ slots ─ other ─▶ program

A pass is a function from frozen data to frozen data. Before `compute` it maps a Schedule to a Schedule, after that a Program to a
Program. A place beside a pass that this lowering leaves out, in parentheses, is between its neighbours. A pass must keep the counts of
stages and micro-batches, the placement, the routes, the ties, and whether there is a backward; the verifier of its place checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipecompile.errors import InputError, ScheduleError, VerifyError, described
from pipecompile.ir import UNTRAINED, Program, Schedule
from pipecompile.ir.pass_manager import Pass
from pipecompile.ir.written_program import type_faults
from pipecompile.text.input_checks import known_names
from pipecompile.text.shown_value import shown

__all__ = ["PLACES", "UserPass", "placed"]

PLACES = ("recompute", "compute", "transfers", "meetings", "ties", "liveness", "lingering", "slots")
"""Names of our passes, in order."""

Rewrite = Callable[[Any], Any]
"""A user's function: from a Schedule to a Schedule, or from a Program to a Program."""


@dataclass(frozen=True, slots=True)
class UserPass:
    """A pass of the user: `run` and its place, `before` or `after` one of ours by name; default after "slots", the last.

    `name` stands in dumps and errors, by default the name of the function. Ours are "recompute", "compute", "transfers", "meetings",
    "ties", "liveness", "lingering" and "slots".
    """

    run: Rewrite
    name: str = ""
    before: str | None = field(default=None, kw_only=True)
    after: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.run):
            raise InputError(
                f"{shown(self.run)} is not a function of a Schedule or a Program", hint="pc.UserPass(function)"
            )
        if (
            not isinstance(self.name, str)
            or not isinstance(self.title, str)
            or self.title in PLACES
            or "\n" in self.title
        ):
            named = self.title if isinstance(self.name, str) else self.name
            why = f"ours are {', '.join(PLACES)}"
            raise InputError(
                f"{shown(named)} is not a name for a pass of yours", why=why, hint='pc.UserPass(function, "mine")'
            )
        if self.before is not None and self.after is not None:
            raise InputError(f"pass {shown(self.title)} is both before and after", hint=f"after={shown(self.after)}")
        known_names(
            f"pass {self.title!r}: the place",
            [place for place in (self.before, self.after) if place is not None],
            PLACES,
        )

    @property
    def title(self) -> str:
        """The name in dumps and errors."""
        return self.name or getattr(self.run, "__name__", type(self.run).__name__)

    @property
    def place(self) -> str:
        """The place in words: after slots."""
        return f"before {self.before}" if self.before else f"after {self.after or PLACES[-1]}"

    @property
    def position(self) -> int:
        """The index in PLACES before which this pass runs."""
        return PLACES.index(self.before) if self.before else PLACES.index(self.after or PLACES[-1]) + 1


Verify = Callable[[Any], None]


def placed(ours: Sequence[Pass], user: Sequence[UserPass], verify_before: Callable[[int], Verify]) -> tuple[Pass, ...]:
    """Return our passes with those of the user at their places, several at one place in the given order.

    `verify_before(i)` is the verifier of what is between pass i - 1 and pass i of PLACES.
    """
    order = [(PLACES.index(one.name) + 0.5, one) for one in ours]
    order += [(one.position, _checked(one, verify_before(one.position))) for one in user]
    return tuple(one for _, one in sorted(order, key=lambda pair: pair[0]))


def _checked(one: UserPass, verify: Verify) -> Pass:
    return Pass(f"{one.title} (of the user, {one.place})", partial(_run, one), partial(_verify, one, verify))


def _run(one: UserPass, subject: Any) -> Any:
    """Run a user's pass. Raise ScheduleError, with its name, if the pass raises, or does not return a result of a pass."""
    where = f"pass {one.title!r}, {one.place}"
    try:
        result = one.run(subject)
    except Exception as error:
        what = f"pass {one.title!r} of compile(passes=...) raised {described(error)}"
        raise ScheduleError(what, where=where, hint=f"call it on the {type(subject).__name__} that it gets") from error
    if fault := next(_changes(subject, result), ""):
        kind = type(subject).__name__
        raise ScheduleError(
            f"pass {one.title!r} of compile(passes=...) returned no {kind} for its {kind}", where=where, why=fault,
            hint=f"return dataclasses.replace({kind.lower()}, rows=...)",
        )  # fmt: skip
    if isinstance(result, Schedule) and result.rows != subject.rows:
        return replace(result, certificate=None)  # it holds for the rows that were searched
    return result


def _verify(one: UserPass, verify: Verify, result: Any) -> None:
    """Raise VerifyError, with the name of the user's pass, if its result is not legal at its place."""
    try:
        verify(result)
    except VerifyError as error:
        raise VerifyError(f"what pass {one.title!r} ({one.place}) made of the {error.subject}", error.faults) from None


def _changes(before: Program | Schedule, after: Any) -> Iterator[str]:
    """Yield why a result is not a result of a pass on `before`."""
    if type(after) is not type(before):
        yield f"it is {'nothing (no return?)' if after is None else f'of type {type(after).__name__}'}"
        return
    yield from type_faults(after)
    for name in ("n_stages", "n_microbatches", "n_slices", "placement", "directions", "routes", "ties"):
        if getattr(before, name, None) != getattr(after, name, None):
            yield f"it has other {name}"
    if len(before.rows) != len(after.rows):
        yield "it has another number of devices"
    elif _trains(before) and not _trains(after):
        yield "it has no backward any more"


def _trains(subject: Program | Schedule) -> bool:
    if isinstance(subject, Schedule):
        return any(action.kind not in UNTRAINED for row in subject.rows for action in row)
    return any(one.action is not None and one.action.kind not in UNTRAINED for row in subject.rows for one in row)
