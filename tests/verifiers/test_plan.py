"""A plan file may be edited by hand: each inconsistent count, stage and device is reported, all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.errors import PlanError, VerifyError
from pipecompile.ir import HOST, Route
from pipecompile.ir.plan import Plan, StageSummary
from pipecompile.verifiers.plan import verify_cut, verify_plan


def summary(stage: int) -> StageSummary:
    return StageSummary(stage, "cpu", "a", "b", 1, 0, 0.0, 1.0, 2.0, 0.0, 0.0, 0, 0)


PLAN = Plan(
    fingerprint="0", n_stages=2, devices=("cpu", "cpu"), placement=(0, 1), stage_of={"a": 0, "b": 1},
    routes=(Route("x", HOST, (0,)), Route("a", 0, (1,)), Route("b", 1, (HOST,))), stages=(summary(0), summary(1)),
    bottleneck=3.0, lower_bound=3.0, status="optimal", method="dp", cost="analytic",
)  # fmt: skip


def test_a_consistent_plan_is_legal() -> None:
    verify_plan(PLAN)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"stage_of": {"a": 0, "b": 2}}, "node b is in stage 2"),
        ({"placement": (0,)}, "placement lists 1 stage"),
        ({"placement": (0, 2)}, "placement puts stage 1 on device 2"),
        ({"stages": (summary(0),)}, "1 stage is summarised"),
        ({"routes": (Route("a", 0, (2,)),)}, r"route a goes from 0 to \[2\]"),
        ({"devices": ("cpu",)}, "it has 2 stages on 1 device\n"),
    ],
)
def test_a_damaged_plan_is_refused_with_the_fault(change: dict[str, object], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        verify_plan(replace(PLAN, **change))


def test_of_many_faults_five_are_listed() -> None:
    damaged = replace(PLAN, stage_of={f"n{index}": 9 for index in range(8)})
    with pytest.raises(PlanError, match="node n4 is in stage 9; and 3 more"):
        verify_plan(damaged)


def test_a_cut_may_not_go_back_nor_part_a_group() -> None:
    stage_of = {"a": 0, "b": 1, "c": 1}
    verify_cut(stage_of, [("a", "b"), ("b", "c")], [("b", "c")], 2)
    with pytest.raises(VerifyError) as caught:
        verify_cut({**stage_of, "c": 5}, [("a", "b"), ("b", "a")], [("a", "b")], 2)
    assert caught.value.faults == (
        "c is in stage 5 of 2",
        "a in stage 0 needs b, which the later stage 1 computes",
        "a, b share memory and are in stages [0, 1]",
    )
