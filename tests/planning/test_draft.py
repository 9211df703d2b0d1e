"""Drafts: the costs of the stages of a cut and the routes between them, and the plan that a draft becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs import NodeCost
from pipecompile.costs.problem_builder import build_problem
from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.graph.cut_transfer import fingerprint, node_lines
from pipecompile.ir import HOST, Route
from pipecompile.ir.candidates import Candidate, Considered
from pipecompile.planning.draft import Draft, make_draft, peak_in_flight, plan_of
from tests.support.compilations import layers, options_of


class Skip(nn.Module):
    """Four nodes: a, b, c and add. The sum reads the result of `a`, which skips b and c."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.a(x)
        return self.c(self.b(kept)) + kept


GRAPH = note_ties(pc.trace(Skip(), torch.zeros(2, 4)))
STAGE_OF = {"a": 0, "b": 1, "c": 2, "add": 2}
COSTS = {
    node.name: NodeCost(float(n), 10.0 * n, 100 * n, 32, weight=1.0 * n)
    for n, node in enumerate(compute_nodes(GRAPH), 1)
}


def draft_of(placement: tuple[int, ...] = (0, 1, 2), samples: int | None = None, recompute: tuple[bool, ...] = (), **keywords: Any) -> Draft:  # fmt: skip
    options = options_of(Skip(), **{"n_stages": 3} | keywords)
    problem = build_problem(GRAPH, COSTS, in_flight=(3.0, 2.0, 1.0))
    partition = pc.Partition(STAGE_OF, 66.0, 60.0, "feasible", "dp", 0.1, recompute)
    return make_draft(GRAPH, partition, problem, COSTS, options, placement, samples)


def test_nodes_are_those_of_the_graph() -> None:
    assert list(COSTS) == list(STAGE_OF)


def test_times_and_sizes_are_sums_over_the_nodes_of_a_stage() -> None:
    first, second, last = draft_of().stages
    assert [(s.forward, s.backward, s.nodes) for s in (first, second, last)] == [(1, 10, 1), (2, 20, 1), (7, 70, 2)]
    assert [s.saved_bytes for s in (first, second, last)] == [100, 200, 700]
    assert [(s.parameters, s.parameter_bytes) for s in (first, second, last)] == [(20, 80), (16, 64), (20, 80)]
    assert [(s.first, s.last) for s in (first, second, last)] == [("a", "a"), ("b", "b"), ("c", "add")]


def test_routes_have_sizes_for_the_samples_and_skips_are_counted() -> None:
    draft = draft_of(samples=5)
    assert {r.value: (r.source, r.consumers, r.nbytes) for r in draft.routes} == {
        "x": (HOST, (0,), 5 * 16), "a": (0, (1, 2), 5 * 16), "b": (1, (2,), 5 * 16), "add": (2, (HOST,), 5 * 16)
    }  # fmt: skip
    assert [stage.sent_bytes for stage in draft.stages] == [160, 80, 0]
    assert [(stage.skips_in, stage.skips_out) for stage in draft.stages] == [(0, 1), (0, 0), (1, 0)]
    assert {r.nbytes for r in draft_of().routes} == {32.0}


def test_a_stage_holds_its_state_and_its_activations_in_flight() -> None:
    draft = draft_of()
    assert [stage.state_bytes for stage in draft.stages] == [160, 128, 160]  # parameters with their gradients
    first, second, last = draft.stages
    assert first.memory == 160 + 3 * 100
    assert second.memory == 128 + 2 * (200 + 32)
    assert last.memory == 160 + 1 * (700 + 32 + 32)
    again = draft_of(recompute=(True, False, False)).stages[0]
    assert again.memory == 160 + 100


def test_received_values_count_unless_they_are_saved() -> None:
    assert [stage.received_bytes for stage in draft_of().stages] == [0, 32, 64]
    costs = COSTS | {"b": NodeCost(2.0, 20.0, 200, 32, saves=frozenset({"a"}))}
    problem = build_problem(GRAPH, costs)
    partition = pc.Partition(STAGE_OF, 66.0, 60.0, "feasible", "dp", 0.1)
    draft = make_draft(GRAPH, partition, problem, costs, options_of(Skip(), n_stages=3), (0, 1, 2))
    assert [stage.received_bytes for stage in draft.stages] == [0, 0, 64]


def test_times_are_at_the_speed_of_the_device_of_each_stage() -> None:
    keywords: dict[str, Any] = {"n_stages": 3, "speeds": [1.0, 2.0, 0.5]}
    assert [stage.forward for stage in draft_of((2, 0, 1), **keywords).stages] == [2.0, 2.0, 3.5]
    assert [stage.backward for stage in draft_of((2, 0, 1), **keywords).stages] == [20.0, 20.0, 35.0]


def test_constraints_are_noted_at_their_stages() -> None:
    stages = draft_of(pin={"b": 1}).stages
    assert [bool(stage.forced) for stage in stages] == [False, True, False]


def test_a_plan_is_the_draft_as_data() -> None:
    draft, options = draft_of((2, 1, 0)), options_of(Skip(), n_stages=3)
    considered = Considered((Candidate(2, "1f1b"),), 0)
    plan = plan_of(GRAPH, draft, "profile", options, unforced=50.0, considered=considered)
    assert (plan.stage_of, plan.routes, plan.placement) == (STAGE_OF, draft.routes, (2, 1, 0))
    assert (plan.bottleneck, plan.lower_bound, plan.status, plan.method) == (66.0, 60.0, "feasible", "dp")
    assert (plan.cost, plan.unforced, plan.considered) == ("profile", 50.0, considered)
    assert (plan.graph, plan.fingerprint) == (node_lines(GRAPH), fingerprint(node_lines(GRAPH)))
    assert [stage.device for stage in plan.stages] == ["cpu"] * 3
    assert plan.devices == ("cpu",) * 3


@pytest.mark.parametrize(("checkpoint", "flags"), [("auto", (True, False, True)), ("always", ())])
def test_a_plan_keeps_the_flags_of_recomputation_that_the_solver_chose(
    checkpoint: str, flags: tuple[bool, ...]
) -> None:
    draft = draft_of(recompute=(True, False, True))
    assert plan_of(GRAPH, draft, "own", options_of(Skip(), n_stages=3, checkpoint=checkpoint)).recompute == flags


def test_the_peak_is_that_of_the_warm_up() -> None:
    options = options_of(layers(4), n_stages=4)
    assert peak_in_flight(pc.build_schedule("1f1b", 4, 8), options) == (4.0, 3.0, 2.0, 1.0)
    assert peak_in_flight(pc.build_schedule("gpipe", 4, 8), options) == (8.0,) * 4


def test_towers_hold_what_their_depth_needs() -> None:
    routes = [Route(f"v{stage}", stage, (3,)) for stage in range(3)]
    schedule = pc.build_schedule("1f1b", 4, 8, routes=routes)
    assert peak_in_flight(schedule, options_of(layers(4), n_stages=4)) == (2.0, 2.0, 2.0, 1.0)
