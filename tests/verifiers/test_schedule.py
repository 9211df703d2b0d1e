from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from program_strategies import route_lists, schedules

from pipecompile.errors import VerifyError
from pipecompile.ir import HOST, Action, Kind, Route, Schedule, chain
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import verify


def faults(schedule: Schedule | str, routes: tuple[Route, ...] | None = None) -> tuple[str, ...]:
    if isinstance(schedule, str):  # from_csv refuses B beside W
        schedule = Schedule.from_rows(line.split(",") for line in schedule.split())
    with pytest.raises(VerifyError) as caught:
        verify(schedule, routes=routes)
    return caught.value.faults


@given(schedules(), st.data())
def test_builders_are_legal_under_a_chain_and_under_any_routes(schedule: Schedule, data: st.DataObject) -> None:
    verify(schedule)
    verify(schedule, routes=data.draw(route_lists(schedule.n_stages)))


@pytest.mark.parametrize(
    ("csv", "expected"),
    [
        ("0F0,0F0,0B0", ["0F0 is run 2 times, once is right"]),
        ("0F0,0F1,0B0,0B1,0B1", ["0B1 is run 2 times, once is right"]),
        ("0F0,0F2", ["stage 0 never runs F for micro-batch 1"]),
        ("0F0,0B0\n1F0", ["stage 1 never runs B, nor I and W, for micro-batch 0"]),
        ("0F0,0B0,0I0,0W0", ["stage 0 runs B and also I or W for micro-batch 0"]),
        ("0F0,0I0", ["stage 0 runs I without W for micro-batch 0"]),
        ("0F0,0W0", ["stage 0 runs W without I for micro-batch 0"]),
        (
            "0F0,0R0",
            [
                "stage 0 never runs B, nor I and W, for micro-batch 0",
                "stage 0 runs R without B or I for micro-batch 0",
            ],
        ),
        ("0F0,0R0,0R0,0B0", ["0R0 is run 2 times, once is right"]),
        ("0R0,0F0,0B0", ["0R0 runs before 0F0, which it needs\n      device 0 │ … 0R0 … 0F0 …"]),
        ("0F0,0B0,0R0", ["0B0 runs before 0R0, which it needs\n      device 0 │ … 0B0 … 0R0 …"]),
        ("0B0,0F0", ["0B0 runs before 0F0, which it needs\n      device 0 │ … 0B0 … 0F0 …"]),
        ("0F0,0W0,0I0", ["0W0 runs before 0I0, which it needs\n      device 0 │ … 0W0 … 0I0 …"]),
        ("1F0,0F0", ["1F0 runs before 0F0, which it needs\n      device 0 │ … 1F0 … 0F0 …"]),
        ("0F0,1F0,0B0,1B0", ["0B0 runs before 1B0, which it needs\n      device 0 │ … 0B0 … 1B0 …"]),
        ("0F0,0F6", ["stage 0 never runs F for micro-batches 1, 2, 3, 4 and 1 more"]),
        ("0F0,0F999", ["stage 0 never runs F for micro-batches 1, 2, 3, 4 and 994 more"]),
    ],
)  # fmt: skip
def test_each_fault_by_itself(csv: str, expected: list[str]) -> None:
    assert list(faults(csv)) == expected


def test_all_faults_are_reported_at_once() -> None:
    assert faults("0B0,0F0,0F0\n1F1,1B1,1W0\n") == (
        "0F0 is run 2 times, once is right",
        "stage 0 never runs F for micro-batch 1",
        "stage 0 never runs B, nor I and W, for micro-batch 1",
        "stage 1 never runs F for micro-batch 0",
        "stage 1 runs W without I for micro-batch 0",
        "0B0 runs before 0F0, which it needs\n      device 0 │ … 0B0 … 0F0 …",
    )


def test_a_deadlock_is_drawn_as_its_cycle() -> None:
    (fault,) = faults("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n")
    assert fault.splitlines() == [
        "deadlock, each waits for the next: "
        "0B0 (device 0) -> 1B0 (device 1) -> 1F1 (device 1) -> 0F1 (device 0) -> 0B0 (device 0)",
        "      device 0 │ … 0B0* 0F1 …",
        "      device 1 │ … 1F1* … 1B0 …",
    ]


#   device 0 │ 0F0 2F0         the chain wants 1F0 between 0F0 and 2F0, and 3F0 after 2F0;
#   device 1 │ 3F0 1F0         routes 0 -> 2 and 1 -> 3 alone do not tie 3F0 to device 0
BRANCHES = Schedule.from_csv("0F0,2F0\n3F0,1F0\n")


def test_routes_take_the_place_of_the_chain() -> None:
    assert len(faults(BRANCHES)) == 1
    verify(BRANCHES, routes=(Route("a", 0, (2,)), Route("b", 1, (2,)), Route("c", HOST, (3,))))


def test_a_skip_is_one_more_dependency() -> None:
    skip = Route("skip", 2, (3,))
    assert "deadlock" in faults(BRANCHES, (Route("b", 1, (2,)), skip))[0]


def test_no_gradient_no_wait() -> None:
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n")
    verify(schedule, routes=(Route("mask", 0, (1,), gradient=False),))


def test_an_action_away_from_home_is_named() -> None:
    schedule = replace(build_schedule("forward", 2, 1), placement=(1, 0))
    assert faults(schedule) == (
        "0F0 is on device 0, stage 0 is placed on device 1",
        "1F0 is on device 1, stage 1 is placed on device 0",
    )


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        (Schedule(0, 1, (), ((),)), "0 stages and 1 micro-batch: at least one of each is needed"),
        (Schedule(1, 0, (0,), ((),)), "1 stage and 0 micro-batches: at least one of each is needed"),
        (Schedule(2, 1, (0,), ((),)), "1 stage is placed, there are 2"),
        (Schedule(1, 1, (1,), ((Action(0, Kind.FORWARD, 0),),)), "stage 0 is placed on device 1, devices are 0 to 0"),
        (Schedule(1, 1, (0,), ((Action(1, Kind.FORWARD, 0),),)), "1F0 on device 0: stages are 0 to 0"),
        (Schedule(1, 1, (0,), ((Action(0, Kind.FORWARD, 1),),)), "0F1 on device 0: micro-batches are 0 to 0"),
    ],
)
def test_counts_that_do_not_fit_together(schedule: Schedule, fault: str) -> None:
    assert faults(schedule) == (fault,)


def test_illegal_routes_are_reported_along_with_the_schedule() -> None:
    first, second = faults("0F0,0F0", (Route("a", 0, (0,)),))
    assert "the route goes back" in first
    assert second == "0F0 is run 2 times, once is right"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules(max_stages=4, max_microbatches=4), st.data())
def test_a_shuffled_schedule_is_legal_just_when_its_graph_has_no_cycle(schedule: Schedule, data: st.DataObject) -> None:
    device = data.draw(st.sampled_from(range(schedule.n_devices)))
    row = list(schedule.rows[device])
    for _ in range(data.draw(st.integers(1, 3))):
        i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        row[i], row[j] = row[j], row[i]
    rows = (*schedule.rows[:device], tuple(row), *schedule.rows[device + 1 :])
    shuffled = replace(schedule, rows=rows, overlaps=frozenset())
    assume(shuffled.rows != schedule.rows)
    try:
        verify(shuffled)
        legal = True
    except VerifyError:
        legal = False
    assert legal == nx.is_directed_acyclic_graph(graph_of(shuffled))


def graph_of(schedule: Schedule) -> nx.DiGraph:
    """Every dependency of the chain, written down one by one, and the order of the rows."""
    graph = nx.DiGraph()
    have = {str(action) for row in schedule.rows for action in row}
    for row in schedule.rows:
        graph.add_edges_from((str(a), str(b)) for a, b in pairwise(row))
    for m in range(schedule.n_microbatches):
        for s in range(schedule.n_stages):
            edges = [(f"{s}F{m}", f"{s}B{m}"), (f"{s}F{m}", f"{s}I{m}"), (f"{s}I{m}", f"{s}W{m}")]
            edges += [(f"{s}F{m}", f"{s}R{m}"), (f"{s}R{m}", f"{s}B{m}"), (f"{s}R{m}", f"{s}I{m}")]
            edges += [(f"{s}F{m}", f"{s + 1}F{m}")]
            edges += [(f"{s + 1}{late}{m}", f"{s}{early}{m}") for late in "BI" for early in "BI"]
            graph.add_edges_from((a, b) for a, b in edges if a in have and b in have)
    return graph


def test_a_chain_is_what_no_routes_means() -> None:
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n")
    assert faults(schedule) == faults(schedule, chain(2))
