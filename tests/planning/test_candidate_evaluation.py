"""One candidate of the joint search: cut, drafted and simulated, or left out with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pipecompile as pc
from pipecompile.costs import NodeCost
from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.ir.candidates import Candidate, Considered
from pipecompile.options import Options
from pipecompile.planning import candidate_evaluation
from pipecompile.planning.candidate_evaluation import CandidateEvaluator, Evaluated, Point
from pipecompile.planning.cost_table import MeasuredCosts
from tests.support.compilations import layers, options_of

GRAPH = note_ties(pc.trace(layers(4), torch.zeros(2, 4)))
SAMPLES = 3
COSTS = MeasuredCosts("own", {node.name: NodeCost(1.0, 2.0, 1000, 32) for node in compute_nodes(GRAPH)})


def evaluator_of(n_counts: int = 1, **keywords: Any) -> CandidateEvaluator:
    keywords = {"schedule": "auto", "n_microbatches": "auto", "time_limit": 10} | keywords
    return CandidateEvaluator(GRAPH, options_of(**keywords), {SAMPLES: COSTS}, n_counts)


def point_of(options: Options, count: int = 4, schedule: str = "1f1b") -> Point:
    chosen = replace(options, n_microbatches=count, schedule=schedule)
    return Point(count, SAMPLES, chosen, chosen.schedule_for(count))


def evaluated(evaluator: CandidateEvaluator, count: int = 4, schedule: str = "1f1b") -> Evaluated:
    return evaluator.evaluate(point_of(evaluator.options, count, schedule))


def test_a_candidate_has_the_time_and_the_memory_of_its_step() -> None:
    row = evaluated(evaluator_of())
    assert row.draft is not None
    assert row.draft.partition.stage_of == {"_0": 0, "_1": 0, "_2": 1, "_3": 1}
    assert (row.candidate.n_microbatches, row.candidate.schedule, row.candidate.left_out) == (4, "1f1b", "")
    assert row.candidate.bottleneck == pytest.approx(6.0)
    assert row.seconds == pytest.approx(5 * 6.0)  # four micro-batches and a bubble of one stage
    assert row.candidate.memory == (2 * 160 + 2 * 2000, 2 * 160 + 1 * (2000 + 32))
    assert row.sort_key == (4, row.seconds)


def test_schedules_share_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, solve = [], candidate_evaluation.solve_cut
    monkeypatch.setattr(candidate_evaluation, "solve_cut", lambda *inputs: solved.append(1) or solve(*inputs))
    evaluator = evaluator_of()
    first, second = (evaluated(evaluator, 4, schedule) for schedule in ("1f1b", "gpipe"))
    assert solved == [1]
    assert first.draft.partition is second.draft.partition  # type: ignore[union-attr]
    assert evaluator.seconds_spent > 0


def test_a_cut_that_fits_nowhere_is_left_out_with_its_place() -> None:
    evaluator = evaluator_of(memory_limit=10.0)
    row = evaluated(evaluator)
    assert row.draft is None
    assert row.candidate.left_out == "node '_0': 1160 bytes alone, the largest limit is 10 bytes"
    assert row.sort_key == (4, float("inf"))
    assert not evaluator.has_fit


def test_a_cut_without_a_limit_is_replaced_where_it_does_not_fit() -> None:
    free = evaluated(evaluator_of())
    tight = evaluated(evaluator_of(memory_limit=0.9 * max(free.candidate.memory)))
    assert tight.draft is not None
    assert max(tight.candidate.memory) <= 0.9 * max(free.candidate.memory)
    assert tight.seconds > free.seconds


def test_once_a_candidate_fits_the_others_have_half_of_the_time() -> None:
    evaluator = evaluator_of(time_limit=8)
    assert evaluator.budget == 4
    evaluator.seconds_spent = 4.5
    assert evaluated(evaluator).draft is not None  # nothing fits yet
    row = evaluated(evaluator, 2)
    assert (row.draft, row.candidate.left_out) == (None, "not tried: half of time_limit was up")


def test_a_point_that_is_ruled_out_keeps_its_reason_and_the_name_of_a_schedule_that_does_not_exist() -> None:
    evaluator = evaluator_of()
    options = options_of(schedule="zbv", n_stages=4, devices=["cpu"] * 2)
    unbuilt = evaluator.evaluate(Point(3, 2, options, reason="too few", error=pc.ScheduleError("too few")))
    assert unbuilt.candidate == Candidate(3, "zbv", left_out="too few")
    unmeasured = evaluator.evaluate(Point(3, 2, options, reason="fails", error=pc.CostError("fails")))
    assert unmeasured.candidate == Candidate(3, "", left_out="fails")


def test_a_searched_schedule_has_the_same_cut() -> None:
    evaluator = evaluator_of()
    row = evaluated(evaluator)
    searched = evaluator.with_searched_schedule(row)
    assert searched.candidate.schedule == "auto"
    assert searched.seconds <= row.seconds
    assert searched.draft.partition is row.draft.partition  # type: ignore[union-attr]


def test_a_search_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*inputs: object) -> None:
        raise pc.ScheduleError("none found", why="too little memory")

    evaluator = evaluator_of()
    row = evaluated(evaluator)
    monkeypatch.setattr(candidate_evaluation, "make_schedule", fail)
    searched = evaluator.with_searched_schedule(row)
    assert (searched.draft, searched.candidate) == (None, Candidate(4, "auto", left_out="too little memory"))


@pytest.mark.parametrize(("status", "partitioner", "times"), [("optimal", "auto", 0), ("feasible", "dp", 0), ("feasible", "auto", 1)])  # fmt: skip
def test_only_a_cut_without_proof_is_solved_again(
    status: Any, partitioner: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = evaluator_of(partitioner=partitioner)
    row = evaluated(evaluator)
    assert row.draft is not None
    row = replace(row, draft=replace(row.draft, partition=replace(row.draft.partition, status=status)))
    solved, solve = [], candidate_evaluation.solve_cut
    monkeypatch.setattr(candidate_evaluation, "solve_cut", lambda *inputs: solved.append(inputs) or solve(*inputs))
    assert evaluator.cut_again(row) is row  # no cut is better
    assert len(solved) == times


def test_a_second_cut_is_taken_if_it_makes_the_step_shorter() -> None:
    evaluator = evaluator_of()
    point = point_of(evaluator.options)
    row = evaluator.evaluate(point)
    assert row.draft is not None
    worse = replace(row.draft.partition, stage_of={"_0": 0, "_1": 1, "_2": 1, "_3": 1}, status="feasible")
    draft = evaluator._draft(point, worse, row.draft.problem, (0, 1))
    slow = evaluator._simulated(Candidate(4, "1f1b"), point, draft, None)
    assert slow.seconds > row.seconds
    again = evaluator.cut_again(slow)
    assert again.seconds == pytest.approx(row.seconds)
    assert again.draft.partition.status == "optimal"  # type: ignore[union-attr]


def test_the_plan_of_a_row_has_its_cut_and_all_candidates() -> None:
    evaluator = evaluator_of()
    row = evaluated(evaluator)
    considered = Considered((row.candidate,), 0)
    planned = evaluator.plan(row, considered)
    assert planned.plan.stage_of == row.draft.partition.stage_of  # type: ignore[union-attr]
    assert (planned.plan.cost, planned.plan.considered, planned.samples) == ("own", considered, SAMPLES)
    assert planned.problem is not None
    assert planned.problem.in_flight == (2.0, 1.0)


def test_if_nothing_fits_the_error_is_that_of_most_micro_batches_and_fewest_in_flight() -> None:
    evaluator = evaluator_of(n_counts=2, memory_limit=10.0)
    for count, schedule in ((4, "1f1b"), (4, "gpipe"), (2, "1f1b")):
        evaluated(evaluator, count, schedule)
    error = evaluator.nothing_fits()
    assert isinstance(error, pc.InfeasibleError)
    assert error.what.endswith("with none of 2 numbers of micro-batches")
    assert error.where.startswith("4 micro-batches, 1f1b: ")
    assert "memory_limit=" in error.hint


def test_a_lack_of_memory_counts_before_other_errors() -> None:
    evaluator, options = evaluator_of(memory_limit=10.0), options_of()
    failed = pc.CostError("fails")
    evaluator.evaluate(Point(8, 1, options, reason="fails", error=failed))
    assert evaluator.nothing_fits() is failed
    evaluated(evaluator)
    assert isinstance(evaluator.nothing_fits(), pc.InfeasibleError)


def test_if_the_recording_serves_no_number_the_first_reason_is_named() -> None:
    evaluator = evaluator_of(n_counts=2)
    for count, reason in ((4, "branches at 3"), (2, "branches at 6")):
        row = evaluator.evaluate(Point(count, SAMPLES, evaluator.options, reason=reason))
        assert row.candidate == Candidate(count, "", left_out=reason)
    error = evaluator.nothing_fits()
    assert isinstance(error, pc.InputError)
    assert (error.why, error.where) == ("branches at 3", "4 micro-batches, the largest of 3 samples")
    assert "none of 2 numbers" in error.what
    assert error.hint.startswith("n_microbatches=4:")
