"""A plan whose figures contradict each other is refused, and not shown as it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.errors import PlanError
from pipecompile.ir import HOST, Route
from pipecompile.ir.plan import Plan, StageSummary
from pipecompile.ir.plan_figures import figure_faults, moved_stages


def summary(stage: int, sent: float, **skips: int) -> StageSummary:
    return StageSummary(
        stage, "cpu", "a", "b", 1, 0, 0.0, 1.0, 2.0, 0.0, sent, skips.get("into", 0), skips.get("out", 0)
    )


ROUTES = (
    Route("x", HOST, (0,)), Route("a", 0, (1, 2), 4.0), Route("b", 1, (2,), 2.0), Route("c", 2, (HOST,), 9.0),
)  # fmt: skip
STAGES = (summary(0, 8.0, out=1), summary(1, 2.0), summary(2, 0.0, into=1))
PLAN = Plan(
    fingerprint="0", n_stages=3, devices=("cpu",) * 3, placement=(0, 1, 2), stage_of={"a": 0, "b": 1, "c": 2},
    routes=ROUTES, stages=STAGES, bottleneck=3.0, lower_bound=3.0, status="optimal", method="dp", cost="analytic",
)  # fmt: skip


def test_a_plan_as_it_was_written_has_no_fault() -> None:
    assert not list(figure_faults(PLAN))
    assert not list(figure_faults(replace(PLAN, lower_bound=2.0, status="feasible", unforced=0.0, samples=1)))
    assert Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"bottleneck": 1.0}, "lower_bound 3 is above bottleneck 1"),
        ({"bottleneck": 5.0}, "status is 'optimal', and bottleneck 5 is above lower_bound 3"),
        ({"lower_bound": -1.0}, r"lower_bound is -1\.0"),
        ({"status": "excellent"}, "status is 'excellent', neither"),
        ({"samples": 0}, "samples is 0"),
        ({"routes": ROUTES[:2]}, "stage 1 has sent_bytes 2, and its routes 0"),
        ({"routes": (*ROUTES[:3], Route("c", 2, (1,)))}, r"route 'c' goes from 2 to \[1\]"),
        ({"routes": (*ROUTES[:3], Route("c", 2, (HOST,), -9.0))}, r"route 'c' has -9\.0 bytes"),
        ({"routes": (ROUTES[0], Route("a", 0, (1,), 8.0), ROUTES[2])}, "stage 0 has skips 0/1 in/out, and its routes 0/0"),
        ({"stages": (*STAGES[:2], replace(STAGES[2], device="cuda:1"))}, "stage 2 is on 'cuda:1', and its place is 'cpu'"),
        ({"stages": (*STAGES[:2], replace(STAGES[2], forward=-1.0))}, r"stage 2 has forward -1\.0"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(change: dict[str, object], fault: str) -> None:
    """Before, `pipecompile show` wrote such figures as they stand: "gap -1822650.0%"."""
    with pytest.raises(PlanError, match=fault):
        Plan.from_json(replace(PLAN, **change).to_json())


def test_nodes_that_were_moved_by_hand_are_seen() -> None:
    moved = replace(PLAN, stage_of={"a": 0, "b": 2, "c": 2})
    assert (moved_stages(PLAN), moved_stages(moved)) == ([], [1, 2])
    assert not list(figure_faults(moved))
