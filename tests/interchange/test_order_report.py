"""The known cases are found from files alone: two deadlocks and a stall, with the ranks and lines that wait.

deferred-receives.csv         pytorch issue 172668: receives put off to their readers; both ranks stand at a send
communicators-in-a-ring.csv   Megatron-LM 5240: communicators of pairs, made at the first message, entered in a ring
front-loaded-receives.csv     pytorch issue 188833: receives posted early stand in the queue before sends
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from drawn_orders import drawn_order

import pipecompile as pc
from pipecompile.interchange.communicator_rules import CommunicatorRule
from pipecompile.interchange.order_report import OrderReport, check_order
from pipecompile.interchange.pipeline_order import order_of_schedule
from pipecompile.interchange.reordering import repair_order
from pipecompile.interchange.torch_csv import parse_torch_csv
from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate

PIPELINES = Path(__file__).parent / "pipelines"


def outcomes(report: OrderReport) -> dict[str, str]:
    return {verdict.rule.value: verdict.outcome for verdict in report.verdicts}


def test_receives_that_are_put_off_deadlock_where_sends_wait() -> None:
    report = check_order(pc.read_schedule(PIPELINES / "deferred-receives.csv"))
    others = dict.fromkeys(("rendezvous", "pair", "rank", "lazy"), "deadlocks")
    assert outcomes(report) == {"buffered": "runs"} | others
    assert not report.is_sound
    (witness,) = {verdict.witness for verdict in report.verdicts if verdict.outcome == "deadlocks"}
    assert sorted(witness) == [
        "rank 0 (line 1), cell 4 0SEND_F1 waits for rank 1 (line 2), cell 4 1RECV_F1; cell 5 2RECV_F0 comes behind it",
        "rank 1 (line 2), cell 3 1SEND_F0 waits for rank 0 (line 1), cell 5 2RECV_F0; cell 4 1RECV_F1 comes behind it",
    ]


def test_communicators_that_are_made_in_a_ring_deadlock() -> None:
    report = check_order(pc.read_schedule(PIPELINES / "communicators-in-a-ring.csv"))
    assert outcomes(report) == {
        "buffered": "runs", "rendezvous": "runs", "pair": "runs", "rank": "deadlocks", "lazy": "deadlocks",
    }  # fmt: skip
    lazy = report.verdicts[-1]
    assert sorted(lazy.witness) == [
        "rank 0 (line 1), cell 1 4RECV_F0 waits for rank 3 (line 4), cell 3 3SEND_F0; cell 3 0SEND_F0 comes behind it",
        "rank 1 (line 2), cell 1 1RECV_F0 waits for rank 0 (line 1), cell 3 0SEND_F0; cell 4 1SEND_F0 comes behind it",
        "rank 2 (line 3), cell 1 2RECV_F0 waits for rank 1 (line 2), cell 4 1SEND_F0; cell 4 2SEND_F0 comes behind it",
        "rank 3 (line 4), cell 1 3RECV_F0 waits for rank 2 (line 3), cell 4 2SEND_F0; cell 3 3SEND_F0 comes behind it",
    ]


def test_receives_that_are_posted_early_stall_what_is_behind_them() -> None:
    report = check_order(pc.read_schedule(PIPELINES / "front-loaded-receives.csv"))
    found = outcomes(report)
    assert found["pair"] == found["buffered"] == "runs"
    assert found["rank"] == "stalls"
    assert report.is_sound
    rank = next(verdict for verdict in report.verdicts if verdict.rule is CommunicatorRule.RANK)
    assert (report.makespan, rank.makespan) == (57, 67)
    assert rank.witness == (
        "rank 0 (line 1), cell 14 4SEND_F0 could go at 5 and stands for 8 behind rank 0 (line 1), cell 12 4RECV_F3",
    )


@pytest.mark.parametrize("name", ["deferred-receives", "communicators-in-a-ring", "front-loaded-receives"])
def test_a_repaired_order_runs_under_all_rules_without_a_stall(name: str) -> None:
    order = pc.read_schedule(PIPELINES / f"{name}.csv")
    report = check_order(repair_order(order))
    assert set(outcomes(report).values()) == {"runs"}
    assert {verdict.makespan for verdict in report.verdicts} == {check_order(order).makespan}
    assert repair_order(order).schedule == order.schedule


def test_makespan_bound_and_peaks_are_those_of_the_simulator() -> None:
    for seed in range(40):
        order = drawn_order(Random(seed), plain=True)
        report, timeline = check_order(order), simulate(order.schedule)
        assert report.is_sound
        assert report.makespan == timeline.makespan
        assert report.bound is None or report.bound <= timeline.makespan
        peaks = in_flight(order.schedule.rows, order.schedule.placement)
        assert tuple(peak.microbatches for peak in report.peaks) == tuple(peak for peak in peaks if peak)


def test_a_gap_is_the_share_that_another_order_could_save() -> None:
    order = order_of_schedule(build_schedule("gpipe", 4, 8), "gpipe")
    report = check_order(order)
    assert (report.makespan, report.bound) == (33, 33)
    serial = check_order(parse_torch_csv("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"))
    assert (serial.makespan, serial.bound) == (12, 9)
    assert serial.gap == 0.25
    assert "makespan 12, no order takes less than 9 (gap 25.0%)" in str(serial)
    assert "0F1" not in serial.peaks[0].place


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0\n1F0\n", "stage 1 never runs B"),
        ("0F0,0B0,0B0\n", "0B0 is run 2 times"),
        ("0F0,0B0,1F0\n1B0\n", "stage 1 is on device 0 and on device 1"),
        ("0F1,0B1\n", "stage 0 never runs F"),
        ("0F0,0B0,0W0\n", "stage 0 runs B and also I or W"),
        ("0B0,0F0\n", "0B0 runs before 0F0"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlock"),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n", "computations wait for one another"),
        ("0F0,(1F0;1B0)OVERLAP_F_B,0B0\n", "1B0 overlaps with 1F0, which it needs"),
    ],
)
def test_faults_of_computations_are_found(text: str, fault: str) -> None:
    report = check_order(parse_torch_csv(text))
    assert not report.is_sound
    assert any(fault in each for each in report.faults), report.faults
    assert report.verdicts == ()
    assert report.makespan is None


def test_a_report_is_text_and_json() -> None:
    report = check_order(parse_torch_csv("0F0,0B0\n1F0,1B0\n"), "rank")
    assert str(report) == (
        "csv (torch): 2 ranks, 4 computations, 0 messages\n"
        "rank        runs       one queue per rank: makespan 6\n"
        "with unlimited buffers: makespan 6, no order takes less than 6 (gap 0.0%)\n"
        "rank 0: 1 micro-batch in flight at cell 1 0F0\n"
        "rank 1: 1 micro-batch in flight at cell 1 1F0\n"
        "The file has no communication: the rules are those of the order that --repair would write."
    )
    assert report.to_dict()["rules"] == {"rank": {"outcome": "runs", "makespan": 6.0, "witness": []}}
