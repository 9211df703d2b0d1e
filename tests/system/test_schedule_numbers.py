"""Whatever number enters a public function of schedules: it is used, or refused with an error of ours that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipecompile as pc
from pipecompile.errors import InputError, PipecompileError
from pipecompile.ir import Route, chain
from pipecompile.ir.program_text import parse_program
from pipecompile.partitioners.problem import Node, Problem
from pipecompile.passes import lower
from pipecompile.simulation.costs import CostOptions
from tests.support.cpu_time import assert_within

SCHEDULE = pc.build_schedule("1f1b", 2, 3)

CALLS: dict[str, Callable[..., Any]] = {
    "auto_schedule": lambda **given: pc.auto_schedule(**({"n_stages": 2, "n_microbatches": 3, "effort": 0.0} | given)),
    "build_schedule": lambda **given: pc.build_schedule(**({"schedule": "gpipe", "n_stages": 2, "n_microbatches": 3} | given)),
    "build_schedule in slices": lambda **given: pc.build_schedule("seq1f1b", 2, 3, **given),
    "simulate": lambda **given: pc.simulate(SCHEDULE, **given),
    "simulate a program": lambda **given: pc.simulate(lower(SCHEDULE), **given),
    "advise": lambda **given: pc.advise(SCHEDULE, **given),
    "verify": lambda **given: pc.verify(SCHEDULE, **given),
    "verify a program": lambda **given: pc.verify(lower(SCHEDULE), **given),
}  # fmt: skip

NUMBERS = [
    *((name, option) for name in ("auto_schedule", "simulate", "simulate a program", "advise")
      for option in CostOptions.__annotations__ if option not in ("engines", "hosts")),
    *(("auto_schedule", option)
      for option in ("n_stages", "n_microbatches", "n_devices", "placement", "memory_limit", "in_flight", "effort", "time_limit")),
    *(("build_schedule", option) for option in ("n_stages", "n_microbatches", "n_devices")),
    ("build_schedule in slices", "n_slices"),
    ("advise", "faster"), ("advise", "most"), ("verify", "in_flight"),
    *(("verify a program", option) for option in ("in_flight", "memory_limit")),
]  # fmt: skip

NONSENSE = [nan, -1, -inf, "3", b"3", [nan, 1.0], [1.0, "x"], [1.0] * 7, {"v9": 1.0}, 1j, object()]


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_nonsense_is_refused(name: str, option: str) -> None:
    for value in NONSENSE:
        with pytest.raises(PipecompileError):
            CALLS[name](**{option: value})


_SCALARS = st.floats() | st.integers(-9, 9) | st.booleans() | st.none() | st.text(max_size=2)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(NUMBERS),
    _SCALARS | st.lists(_SCALARS, max_size=3) | st.dictionaries(_SCALARS, _SCALARS, max_size=2),
)
def test_any_value_is_used_or_refused(where: tuple[str, str], value: object) -> None:
    name, option = where
    with suppress(PipecompileError):
        CALLS[name](**{option: value})


@pytest.mark.parametrize("name", ["auto_schedule", "simulate", "simulate a program", "advise"])
def test_a_cost_with_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"the cost 'foward' is not known\n .*\n  try    forward"):
        CALLS[name](foward=1.0)


@pytest.mark.parametrize("routes", [5, [5], [Route("v", 0, (7,))], [Route("v", 0, (1,), nan)], [Route("v", 0.5, (1,))]])
@pytest.mark.parametrize("name", ["auto_schedule", "build_schedule", "simulate", "verify"])
def test_routes_that_are_none_are_refused(name: str, routes: Any) -> None:
    with pytest.raises(PipecompileError):
        CALLS[name](routes=routes)


def test_all_numbers_of_the_signatures_are_tried() -> None:
    tried = {option for _, option in NUMBERS} | {
        "routes",
        "checkpoint",
        "split",
        "costs",
        "models",
        "saved_bytes",
        "exact",
    }
    for function in (pc.auto_schedule, pc.build_schedule, pc.simulate, pc.advise, pc.verify):
        assert signature(function).parameters.keys() - tried <= {"subject", "schedule"}


TEXTS: dict[str, tuple[str, Callable[[str], object]]] = {
    "schedule": (SCHEDULE.to_csv(), lambda text: pc.verify(pc.Schedule.from_csv(text))),
    "program": (str(lower(SCHEDULE, chain(2))), lambda text: pc.verify(parse_program(text))),
    "simulated program": (str(lower(SCHEDULE, chain(2))), lambda text: pc.simulate(parse_program(text))),
    "problem": (Problem((Node("a", 1.0), Node("b", 2.0)), (("a", "b"),)).to_json(), Problem.from_json),
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(TEXTS)),
    st.integers(0, 60),
    st.sampled_from(["999999", "999999999", "0", "-1", "1e400", "nan", ""]),
)
def test_a_text_with_another_number_is_read_or_refused_at_once(form: str, nth: int, number: str) -> None:
    text, read = TEXTS[form]
    places = [match.span() for match in re.finditer("[0-9]+", text)]
    begin, end = places[nth % len(places)]

    def take() -> None:
        with suppress(PipecompileError):
            read(text[:begin] + number + text[end:])

    assert_within(2.0, take)


@pytest.mark.parametrize("form", TEXTS)
def test_a_byte_order_mark_is_read(form: str) -> None:
    text, read = TEXTS[form]
    read("\ufeff" + text)
