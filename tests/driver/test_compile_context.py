"""The inputs of a compilation: requests, decisions that later compilations keep, and the state of a pipeline."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.compile_context import CompileContext, Decision
from pipecompile.graph.colocation import note_ties
from pipecompile.graph.cut_transfer import Cut, fingerprint, node_lines
from pipecompile.planning.planner import Planned
from pipecompile.tracing.traced_graph import TracedGraph
from tests.support.compilations import context_of, layers, mini_batch, options_of, request_of


def traced(model: nn.Module) -> TracedGraph:
    return note_ties(pc.trace(model, torch.zeros(2, 4)))


@pytest.fixture(scope="module")
def graph() -> TracedGraph:
    return traced(layers(4))


def plan_of(graph: TracedGraph) -> pc.Plan:
    lines = node_lines(graph)
    stage_of = {"_0": 0, "_1": 0, "_2": 1, "_3": 1}
    return pc.Plan(
        fingerprint(lines), 2, ("cpu",) * 2, (0, 1), stage_of, (), (), 1.0, 1.0, "optimal", "dp", "own", lines
    )


def test_a_request_counts_micro_batches_and_the_samples_of_the_first() -> None:
    model = layers()
    batches = [mini_batch(model, count, torch.zeros(7, 4)) for count in (2, 3, 7)]
    request = request_of(model, *batches)
    assert (request.counts, request.samples) == ((2, 3, 7), 4)
    assert request.signature == request_of(model, *reversed(batches)).signature
    shared = mini_batch(nn.Identity(), 1, 5)
    assert request_of(nn.Identity(), shared).samples is None


def test_without_a_decision_the_graph_is_cut(graph: TracedGraph) -> None:
    assert Decision().on(graph, 2, ()) is None


def test_the_users_plan_is_taken_as_it_is(graph: TracedGraph) -> None:
    plan = plan_of(graph)
    planned = Decision(plan).on(graph, 2, plan.devices)
    assert planned == Planned(plan, None, 2, None)


def test_the_users_plan_must_be_a_legal_plan_of_this_graph(graph: TracedGraph) -> None:
    plan = plan_of(graph)
    with pytest.raises(pc.PlanError, match="for another graph"):
        Decision(plan).on(traced(layers(3)), 2, plan.devices)
    with pytest.raises(pc.PlanError, match="does not cover the graph"):
        Decision(replace(plan, stage_of={"_0": 0})).on(graph, 2, plan.devices)
    with pytest.raises(pc.VerifyError):
        Decision(replace(plan, stage_of=plan.stage_of | {"_0": 1, "_1": 0})).on(graph, 2, plan.devices)


def test_a_cut_is_carried_over_to_a_graph_that_is_alike(graph: TracedGraph) -> None:
    plan = plan_of(graph)
    decision = Decision(plan, None, Cut.of(graph, plan.stage_of, 2))
    assert decision.on(graph, 3, plan.devices) == Planned(plan, None, 3, plan.stage_of)
    shorter = decision.on(traced(layers(3)), 3, plan.devices)
    assert shorter is not None
    assert shorter.stage_of == {"_0": 0, "_1": 0, "_2": 1}
    assert decision.on(traced(nn.Sequential(OrderedDict(a=nn.Tanh(), b=nn.ReLU()))), 3, plan.devices) is None


def test_the_first_plan_and_the_first_cut_are_kept(graph: TracedGraph) -> None:
    plan, problem = plan_of(graph), pc.Problem(())
    first, second = (Cut.of(graph, dict.fromkeys(plan.stage_of, stage), 2) for stage in (0, 1))
    decision = Decision().after(Planned(plan, problem, 2), first)
    assert (decision.plan, decision.problem, decision.cut) == (plan, problem, first)
    other = replace(plan, bottleneck=9.0)
    assert decision.after(Planned(other, pc.Problem((), name="other"), 2), second) == decision
    users = Decision(plan).after(Planned(plan, None, 2), first)
    assert (users.plan, users.problem, users.cut) == (plan, None, first)


def test_a_pipeline_has_a_state_of_its_own() -> None:
    model, options = layers(), options_of()
    one, other = (context_of(model, options) for _ in range(2))
    assert isinstance(one, CompileContext)
    assert one.model is other.model is model
    assert one.homes is not other.homes
    assert one.warnings is not other.warnings
    assert one.meta_init.gather("topic", "text") == ["text"]
    assert one.meta_init.is_done


def test_a_mini_batch_with_fewer_samples_than_micro_batches_is_simulated_as_it_runs() -> None:
    x = torch.randn(6, 4)
    with pytest.warns(pc.RecordingWarning, match="there will be 6"):
        pipe = pc.compile(layers(), 2, example_args=(x,), n_microbatches=9, devices=["cpu"] * 2, loss_fn=torch.mean)
    predicted, schedule = pipe.simulate(), pipe.schedule
    pipe.step(x)
    assert schedule.n_microbatches == 6
    assert schedule == pipe.schedule
    assert predicted.makespan == pipe.simulate().makespan


def test_a_schedule_of_the_user_keeps_its_micro_batches() -> None:
    options = options_of(schedule=pc.build_schedule("gpipe", 2, 9))
    assert Decision(counts=(9, 6)).expected_microbatches(options) == 9
    named = options_of(n_microbatches=9)
    assert Decision(counts=(9, 6)).expected_microbatches(named) == 6
    assert Decision(counts=(4, 3)).expected_microbatches(named) == 9
