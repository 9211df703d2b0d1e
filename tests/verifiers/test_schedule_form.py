"""A schedule that was made by hand from other things than actions is refused before anything reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.errors import VerifyError
from pipecompile.ir import Action
from pipecompile.verifiers.schedule_form import form_faults

SCHEDULE, PERIODIC = pc.build_schedule("1f1b", 2, 4), pc.build_periodic("1f1b", 2, 16)
WRONG: Any = [
    ({"rows": None}, "rows is None, expected a tuple of actions per device"),
    ({"rows": ((1,), (2,))}, "row 0 of rows has 1, expected an Action"),
    ({"rows": ((), (None,))}, "row 1 of rows has None, expected an Action"),
    ({"rows": ((Action("0", "F", 0),), ())}, "row 0 of rows has .*, expected an Action"),  # type: ignore[arg-type]
    ({"placement": None}, "placement is None, expected a tuple with the device of each stage"),
    ({"placement": (0, "1")}, "placement is .*, expected a tuple"),
    ({"n_stages": "2"}, "n_stages is '2', expected a whole number"),
    ({"n_stages": 10**9}, "2 stages are placed, there are 1000000000"),
    ({"n_microbatches": 10**400}, "n_microbatches is 10.*, expected at most"),
]


@pytest.mark.parametrize("call", [pc.verify, pc.simulate, pc.advise, pc.forecast])
@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_other_things_than_actions_are_refused(
    fields: dict[str, Any], message: str, call: Callable[[object], object]
) -> None:
    with pytest.raises(VerifyError, match=message):
        call(replace(SCHEDULE, **fields))


@pytest.mark.parametrize("call", [pc.verify, pc.simulate_periodic, pc.lower_periodic])
@pytest.mark.parametrize(
    "fields", [{"n_stages": 10**9}, {"repetitions": 10**400}, {"period": ((None,),)}, {"step": None}]
)
def test_so_are_periodic_schedules(fields: dict[str, Any], call: Callable[[object], object]) -> None:
    with pytest.raises(VerifyError, match="periodic schedule is not legal"):
        call(replace(PERIODIC, **fields))


def test_schedules_that_are_built_have_no_faults() -> None:
    assert form_faults(SCHEDULE) == form_faults(PERIODIC) == []
