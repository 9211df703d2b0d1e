"""Needs between slices: each fault by itself, and the verifier beside an independent run of random damages."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from damages import is_legal
from sliced_schedules import SLICE_DAMAGES, SLICED, damaged_slices, random_sliced, sliced_works

from pipecompile.errors import VerifyError
from pipecompile.ir import Action, Kind, Schedule
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import verify
from pipecompile.verifiers.slices import slice_needs


def faults(schedule: Schedule | str) -> list[str]:
    schedule = Schedule.from_csv(schedule) if isinstance(schedule, str) else schedule
    with pytest.raises(VerifyError) as caught:
        verify(schedule)
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("csv", "expected"),
    [
        ("0F0.1,0F0.0,0B0.1,0B0.0", "0F0.1 runs before 0F0.0, whose keys and values it reads"),
        ("0F0.0,0F0.1,0B0.0,0B0.1", "0B0.0 runs before 0B0.1, which adds to the gradients of its keys and values"),
        ("0F0.0,0F0.1,0I0.0,0I0.1,0W0.0,0W0.1", "0I0.0 runs before 0I0.1, which adds to the gradients of its keys and values"),
        ("0F0.0,0F0.1,0B0.0,0I0.1,0W0.1", "0B0.0 runs before 0I0.1, which adds to the gradients of its keys and values"),
        ("0F0.0,0B0.0,0F0.1,0B0.1", "0B0.0 runs before 0B0.1, which adds to the gradients of its keys and values"),
        (
            "0F0.0,0OFFLOAD0.0,0F0.1,0RELOAD0.0,0B0.1,0B0.0",
            "0OFFLOAD0.0 runs before 0F0.1, which reads the keys and values that it moves",
        ),
        (
            "0F0.0,0F0.1,0OFFLOAD0.0,0B0.1,0RELOAD0.0,0B0.0",
            "0B0.1 runs before 0RELOAD0.0, which brings back keys and values that it reads",
        ),
        ("0F0.0,0F0.1,0R0.0,0B0.1,0B0.0,0F1.0,0F1.1,0B1.1", "stage 0 never runs B, nor I and W, for slice 1.0"),
        ("0F0.0,0F1.1", "stage 0 never runs F for slices 0.1, 1.0"),
    ],
)  # fmt: skip
def test_each_fault_by_itself(csv: str, expected: str) -> None:
    first, *others = faults(csv)
    assert first.splitlines()[0] == expected
    assert not others


def test_a_fault_shows_where_in_the_row_and_marks_both_actions() -> None:
    with pytest.raises(VerifyError) as caught:
        verify(Schedule.from_csv("0F0.0,0F0.1,0B0.1,0B0.0\n1F0.1,1F0.0,1B0.1,1B0.0"))
    text = str(caught.value)
    assert "device 1 │ … 1F0.1 … 1F0.0 …" in text
    assert "device 1 │ 1F0.1* 1F0.0* 1B0.1  1B0.0" in text


def test_weights_and_recomputations_may_wait_for_other_slices_in_any_order() -> None:
    verify(Schedule.from_csv("0F0.0,0F0.1,0I0.1,0I0.0,0W0.0,0W0.1"))
    verify(Schedule.from_csv("0F0.0,0R0.0,0F0.1,0R0.1,0B0.1,0B0.0"))


def test_a_pair_that_needs_another_slice_is_no_pair() -> None:
    assert faults("0F0.0,(0F0.1;0B0.1)OVERLAP_F_B,0B0.0")[0] == "0B0.1 overlaps with 0F0.1, which it needs"
    verify(Schedule.from_csv("0F0.0,0F0.1,(0F1.0;0B0.1)OVERLAP_F_B,(0F1.1;0B0.0)OVERLAP_F_B,0B1.1,0B1.0"))


def test_a_cycle_through_slices_of_two_devices_is_a_deadlock() -> None:
    (fault,) = faults("0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1B0.1,1F0.1,1B0.0")
    assert fault.startswith("1B0.1 runs before 1F0.1, which it needs")
    assert (
        "deadlock"
        in faults("0F0.0,0B1.1,0F0.1,0F1.0,0F1.1,0B1.0,0B0.1,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0,1F1.0,1F1.1,1B1.1,1B1.0")[
            -1
        ]
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"n_slices": 1}, "0F0.0 on device 0: it has a slice, and micro-batches are whole"),
        ({"n_slices": 0}, "0 slices per micro-batch: at least one is needed"),
        ({"n_slices": 5}, "5 slices per micro-batch, and the schedule has 4 actions"),
        ({"n_slices": 3}, "stage 0 never runs F for slice 0.2"),
        ({"rows": ((Action(0, Kind.FORWARD, 0), Action(0, Kind.FORWARD, 0, 1)),)}, "0F0 on device 0: it has no slice, and micro-batches have 2"),
        ({"rows": ((Action(0, Kind.FORWARD, 0, 0), Action(0, Kind.FORWARD, 0, 2)),)}, "0F0.2 on device 0: slices are 0 to 1"),
        ({"rows": ((Action(0, Kind.UNSHARD, -1, 1), Action(0, Kind.FORWARD, 0, 0)),)}, "0UNSHARD-1.1 on device 0: UNSHARD has no slice"),
    ],
)  # fmt: skip
def test_slices_that_do_not_fit_the_counts(change: dict[str, object], fault: str) -> None:
    schedule = replace(build_schedule("seq1f1b", 1, 1, n_slices=2), **change)
    assert faults(schedule)[0] == fault


@pytest.mark.parametrize("slices", [10**15, 10**12])
def test_an_absurd_number_of_slices_is_refused_at_once(slices: int) -> None:
    assert "slices per micro-batch" in faults(replace(build_schedule("seq1f1b", 2, 2), n_slices=slices))[0]


def test_needs_are_those_of_neighbours() -> None:
    assert slice_needs(Kind.FORWARD, 0, 3) == []
    assert slice_needs(Kind.FORWARD, 2, 3) == [(1, Kind.FORWARD)]
    assert slice_needs(Kind.INPUT_GRAD, 1, 3) == [(2, Kind.BACKWARD), (2, Kind.INPUT_GRAD)]
    assert slice_needs(Kind.WEIGHT_GRAD, 1, 3) == slice_needs(Kind.RECOMPUTE, 1, 3) == []


def test_what_is_not_damaged_is_legal_by_both() -> None:
    for number in range(60):
        schedule = random_sliced(Random(f"whole {number}"))
        assert is_legal(schedule), str(schedule)
        assert sliced_works(schedule), str(schedule)
        assert Schedule.from_csv(schedule.to_csv()) == schedule


@pytest.mark.parametrize("how", SLICE_DAMAGES)
def test_the_verifier_flags_each_damage_that_a_run_finds_wrong_and_no_other(
    how: str, pytestconfig: pytest.Config
) -> None:
    verdicts = set()
    for number in range(1000 if pytestconfig.getoption("--full") else 60):
        rng = Random(f"{how} {number}")
        schedule = random_sliced(rng)
        damage = damaged_slices(rng, schedule, how)
        verdicts.add(is_legal(damage))
        assert is_legal(damage) == sliced_works(damage), (str(schedule), str(damage))
    assert False in verdicts


def test_all_names_with_slices_are_tried() -> None:
    assert SLICED == ["seq1f1b", "seq1f1b-interleaved", "terapipe"]
