"""Passes of users: placed by name, verified after, timed, and named in every error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.errors import InputError, ScheduleError, VerifyError
from pipecompile.ir import Instruction, Op, Operand, Program, Route, Schedule, Tie, Value
from pipecompile.passes import lower
from pipecompile.passes.split_backward import split_backward
from pipecompile.passes.user_passes import PLACES, UserPass

SCHEDULE = pc.build_schedule("1f1b", 3, 4)


def same(subject: Any) -> Any:
    return replace(subject)


def frees_last(program: Program) -> Program:
    """Free everything at the end of its row, so that nothing can share a slot."""
    rows = ([*(i for i in r if i.op is not Op.FREE), *(i for i in r if i.op is Op.FREE)] for r in program.rows)
    return replace(program, rows=tuple(map(tuple, rows)))


def titles(*passes: Any, **options: Any) -> list[str]:
    texts: list[str] = []
    lower(SCHEDULE, passes=passes, dump=texts.append, **options)
    return [text.split(":")[0].removeprefix("== ").split(" (")[0] for text in texts]


OURS = ["compute", "transfers", "meetings", "liveness", "slots"]


@pytest.mark.parametrize("place", PLACES)
def test_every_place_is_before_and_after_the_pass_of_that_name(place: str) -> None:
    """A pass that this lowering leaves out has a place between its neighbours."""
    options: dict[str, Any] = {"checkpoint": "always", "overlap": True, "ties": (Tie("w", (0, 2)),)}
    assert titles(**options) == list(PLACES)
    here = PLACES.index(place)
    assert titles(UserPass(same, before=place), **options) == [*PLACES[:here], "same", *PLACES[here:]]
    assert titles(UserPass(same, after=place), **options) == [*PLACES[: here + 1], "same", *PLACES[here + 1 :]]
    short = [
        *(name for name in PLACES[:here] if name in OURS),
        "same",
        *(name for name in PLACES[here:] if name in OURS),
    ]
    assert titles(UserPass(same, before=place)) == short


def test_passes_at_one_place_run_in_their_order_and_the_last_place_is_usual() -> None:
    first, second = UserPass(same, "first", after="slots"), UserPass(same, "second")
    assert titles(first, second) == [*OURS, "first", "second"]
    assert (second.title, UserPass(same).title, second.place) == ("second", "same", "after slots")


def test_the_text_of_a_pass_has_its_time_and_what_it_changed() -> None:
    texts: list[str] = []
    program = lower(SCHEDULE, passes=[UserPass(frees_last, before="slots")], dump=texts.append)
    (text,) = [text for text in texts if "frees_last" in text]
    assert text.startswith("== frees_last (of the user, before slots): ")
    assert " ms\n" in text
    assert "-  FREE v0#0" in text
    assert {i.op for i in program.rows[0][-4:]} == {Op.FREE}
    pc.verify(program)


def test_a_schedule_is_changed_before_compute() -> None:
    program = lower(SCHEDULE, passes=[UserPass(split_backward, before="compute")])
    assert program == lower(split_backward(SCHEDULE))
    searched = pc.auto_schedule(3, 4)
    assert searched.certificate is not None
    seen: list[Schedule] = []

    def note(schedule: Schedule) -> Schedule:
        seen.append(schedule)
        return schedule

    lower(searched, passes=[UserPass(split_backward, before="compute"), UserPass(note, before="compute")])
    assert seen[0].certificate is None


# -- faulty passes --------------------------------------------------------------------------------------------------


def raising(_: Any) -> Any:
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize("place", PLACES)
def test_a_pass_that_raises_is_named(place: str) -> None:
    with pytest.raises(ScheduleError, match=r"pass 'raising' .* raised ZeroDivisionError: by zero") as caught:
        lower(SCHEDULE, passes=[UserPass(raising, after=place)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert f"after {place}" in caught.value.where


def without_backward(schedule: Schedule) -> Schedule:
    rows = tuple(tuple(a for a in row if a.kind.value == "F") for row in schedule.rows)
    return replace(schedule, rows=rows)


NONSENSE: list[tuple[Any, str, str]] = [
    (lambda p: None, "slots", "no return"), (lambda p: str(p), "slots", "of type str"),
    (lambda p: SCHEDULE, "slots", "of type Schedule"), (lambda s: lower(s), "recompute", "of type Program"),
    (lambda p: replace(p, rows=None), "compute", "a tuple per device"),
    (lambda p: replace(p, rows=(*p.rows[:2], ("0F0",))), "slots", "device 2, step 0: '0F0' is not an Instruction"),
    (lambda p: replace(p, rows=p.rows[:2]), "slots", "another number of devices"),
    (lambda p: replace(p, placement=(1, 0, 2)), "meetings", "other placement"),
    (lambda p: replace(p, routes=()), "liveness", "other routes"),
    (lambda p: replace(p, routes=(*p.routes, Route("v9", 0, (1,)))), "compute", "other routes"),
    (lambda p: replace(p, ties=(Tie("w", (0, 1)),)), "slots", "other ties"),
    (lambda p: replace(p, n_microbatches=2), "slots", "other n_microbatches"),
    (lambda p: lower(without_backward(SCHEDULE)), "slots", "no backward any more"),
    (without_backward, "recompute", "no backward any more"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "after", "why"), NONSENSE)
def test_a_pass_that_returns_nonsense_is_named(run: Any, after: str, why: str) -> None:
    with pytest.raises(ScheduleError, match="pass 'mine' of compile") as caught:
        lower(SCHEDULE, passes=[UserPass(run, "mine", after=after)])
    assert why in caught.value.why


def swapped(row: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    return (*row[:i], row[i + 1], row[i], *row[i + 2 :])


def without(op: Op) -> Any:
    def run(program: Program) -> Program:
        return replace(program, rows=tuple(tuple(i for i in row if i.op is not op) for row in program.rows))

    return run


BREAKING: list[tuple[Any, str, str]] = [
    (lambda s: replace(s, rows=(s.rows[0][::-1], *s.rows[1:])), "recompute", "which it needs"),
    (lambda p: replace(p, rows=(p.rows[0][1:], *p.rows[1:])), "transfers", "never runs F"), (without(Op.SEND), "transfers", "never sent"),
    (without(Op.RECV), "meetings", "never received"), (without(Op.FREE), "liveness", "never freed"),
    (without(Op.FREE), "slots", "never freed"),
    (lambda p: replace(p, rows=(swapped(p.rows[0], 0), *p.rows[1:])), "slots", "not on this device yet"),
    (lambda p: replace(p, rows=(p.rows[0], (Instruction(Op.FREE, (Operand(Value("v0", 0), 0),)), *p.rows[1]), p.rows[2])),
     "slots", "not on this device yet"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "after", "fault"), BREAKING)
def test_a_pass_that_breaks_the_program_is_named_with_the_faults(run: Any, after: str, fault: str) -> None:
    with pytest.raises(VerifyError, match=rf"what pass 'mine' \(after {after}\) made of the ") as caught:
        lower(SCHEDULE, passes=[UserPass(run, "mine", after=after)])
    assert any(fault in line for line in caught.value.faults)


def frees_at_once(program: Program) -> Program:
    """Free received values after their reader: fine in one memory, not where copies run beside compute."""
    sequential = lower(SCHEDULE)
    return replace(program, rows=sequential.rows)


def test_where_copies_run_beside_compute_received_values_stay() -> None:
    lower(SCHEDULE, passes=[UserPass(frees_at_once)])
    with pytest.raises(VerifyError, match="copies run beside compute"):
        lower(SCHEDULE, passes=[UserPass(frees_at_once)], overlap=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"run": 3}, "3 is not a function"), ({"run": same, "name": "slots"}, "'slots' is not a name"),
        ({"run": same, "name": "a\nb"}, "is not a name"), ({"run": same, "name": 3}, "is not a name"),
        ({"run": same, "before": "slots", "after": "compute"}, "both before and after"),
        ({"run": same, "before": "slot"}, "'slot' is not known"), ({"run": same, "after": 3}, "3 is not known"),
    ],
)  # fmt: skip
def test_a_wrong_place_or_name_is_refused_where_it_is_written(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        UserPass(**arguments)
