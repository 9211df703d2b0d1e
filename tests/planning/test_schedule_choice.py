"""The schedule of a step: from the catalogue, with early recomputation, or searched under the costs of the stages."""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs.device_specs import PCIE4, Links
from pipecompile.ir import HOST, Kind, Route
from pipecompile.ir.plan import StageSummary
from pipecompile.planning.schedule_choice import _room, make_schedule, search_schedule, simulation_costs
from tests.support.compilations import options_of
from tests.support.eager import accumulate, assert_same, square_loss

STAGE = StageSummary(0, "cpu", "a", "b", 1, 1, 4.0, forward=1.0, backward=2.0, saved_bytes=10.0, sent_bytes=0.0, skips_in=0,
                     skips_out=0, state_bytes=100.0)  # fmt: skip
STAGES = (STAGE, replace(STAGE, stage=1, received_bytes=4.0))
ROUTES = (Route("x", HOST, (0,), 8.0, gradient=False), Route("a", 0, (1,), 4.0), Route("b", 1, (HOST,), 4.0))


def recomputed(schedule: pc.Schedule) -> set[str]:
    return {str(action) for row in schedule.rows for action in row if action.kind is Kind.RECOMPUTE}


def test_costs_are_per_stage_and_per_route() -> None:
    stages = (STAGE, replace(STAGES[1], weight=0.5, dividing=0.25, weight_saved_bytes=3.0))
    assert simulation_costs(stages, ROUTES, Links(1.0, 0.5), (0, 1)) == {
        "forward": [1.0, 1.0],
        "input_grad": [1.0, 1.75],
        "weight_grad": [1.0, 0.5],
        "backward": [2.0, 2.0],
        "transfer": {"x": 8.5, "a": 4.5, "b": 4.5},
        "host_bandwidth": PCIE4,
        "saved_bytes": [10.0, 14.0],
        "weight_saved_bytes": [10.0, 3.0],
    }


def test_inputs_take_no_time_where_devices_share_a_memory() -> None:
    assert simulation_costs(STAGES, ROUTES, Links(0.0, 0.0), (0, 1))["host_bandwidth"] == math.inf


def test_transfers_are_slower_on_slow_links() -> None:
    links = Links(1.0, 0.5, ((0.0, 3.0), (1.0, 0.0)))
    assert simulation_costs(STAGES, ROUTES, links, (0, 1))["transfer"]["a"] == 3 * 4.5
    assert simulation_costs(STAGES, ROUTES, links, (1, 0))["transfer"]["a"] == 4.5


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_named_schedule_is_that_of_the_catalogue(checkpoint: str) -> None:
    options = options_of(schedule="gpipe", checkpoint=checkpoint)
    assert make_schedule(options, STAGES, ROUTES, (0, 1), 3) == options.schedule_for(3)


def test_recomputation_moves_ahead_of_waiting_times_if_values_may_be_restored_early() -> None:
    options = options_of(schedule="1f1b", checkpoint="always", restored=2)
    usual, early = options.schedule_for(4), make_schedule(options, STAGES, ROUTES, (0, 1), 4)
    assert early != usual
    assert recomputed(early) == recomputed(usual)
    pc.verify(early)


def test_auto_is_searched_for_the_placement() -> None:
    schedule = make_schedule(options_of(schedule="auto"), STAGES, ROUTES, (1, 0), 3)
    assert (schedule.name, schedule.placement, schedule.n_microbatches) == ("auto", (1, 0), 3)
    pc.verify(schedule)


def test_without_a_placement_the_search_chooses_one() -> None:
    options = options_of(n_stages=4, devices=["cpu"] * 2, schedule="auto")
    stages = tuple(replace(STAGE, stage=stage) for stage in range(4))
    routes = tuple(Route(f"v{stage}", stage, (stage + 1,), 4.0) for stage in range(3))
    schedule = search_schedule(options, stages, routes, 4)
    assert set(schedule.placement) == {0, 1}
    pc.verify(schedule)


def test_the_last_micro_batch_is_not_recomputed_on_request() -> None:
    always = search_schedule(options_of(schedule="auto", checkpoint="always"), STAGES, ROUTES, 2, (0, 1))
    but_last = search_schedule(options_of(schedule="auto", checkpoint="except_last"), STAGES, ROUTES, 2, (0, 1))
    assert {"0R0", "0R1"} <= recomputed(always)
    assert recomputed(but_last) == {name for name in recomputed(always) if name.endswith("0")}


def test_memory_limits_the_micro_batches_in_flight() -> None:
    rooms = {limit: _room(options_of(schedule="auto", memory_limit=limit), STAGES, ROUTES, (0, 1), 8) for limit in (None, 120.0)}  # fmt: skip
    assert rooms[None] is None
    assert rooms[120.0] == [2.0, 20 / 14]  # 20 bytes beside the state; stage 1 holds 4 received bytes as well
    assert _room(options_of(memory_limit=120.0), STAGES, ROUTES, None, 8) is None
    both = _room(options_of(memory_limit=[300.0, 400.0]), STAGES, ROUTES, (1, 1), 8)
    assert both == [inf, 200 / 24]  # device 0 has no stage, device 1 has both
    again = _room(options_of(memory_limit=120.0, checkpoint="always"), STAGES, ROUTES, (0, 1), 8)
    assert again == [inf, 10 / 4]  # the saved bytes once, what is received per micro-batch
    tight = search_schedule(options_of(schedule="auto", memory_limit=115.0), STAGES, ROUTES, 4, (0, 1))
    assert [action.microbatch for action in tight.rows[0] if action.kind is not Kind.WEIGHT_GRAD][:2] == [0, 0]


def test_a_dag_warms_up_by_depth_unless_that_is_slower() -> None:
    """Stages 0 to 2 are towers, 3 is their head. A tower behind a slow link needs more in flight than its depth."""

    def rows(nbytes: float) -> list[str]:
        routes = (*(Route(f"v{s}", s, (3,), nbytes if s == 0 else 0.0) for s in range(3)), Route("y", 3, (HOST,), 0.0))
        stages = tuple(replace(STAGE, stage=s) for s in range(4))
        options = options_of(n_stages=4, schedule="1f1b", bandwidth=1.0)
        return make_schedule(options, stages, routes, (0, 1, 2, 3), 8).to_csv().splitlines()

    assert [row[:11] for row in rows(0.0)[:3]] == ["0F0,0F1,0B0", "1F0,1F1,1B0", "2F0,2F1,2B0"]
    assert [row[:11] for row in rows(3.0)[:3]] == ["0F0,0F1,0F2", "1F0,1F1,1F2", "2F0,2F1,2B0"]


# -- offloading -------------------------------------------------------------------------------------------------------


def offloaded_counts(schedule: pc.Schedule) -> list[int]:
    return [sum(action.kind is Kind.OFFLOAD for action in row) for row in schedule.rows]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))


def offloading(model: nn.Module, x: torch.Tensor, **options: Any) -> pc.Pipeline:
    return pc.compile(
        model, 3, example_args=(x,), n_microbatches=8, loss_fn=square_loss, cost="analytic",
        **({"devices": ["cpu"] * 3, "schedule": "gpipe", "offload": True} | options),
    )  # fmt: skip


@pytest.mark.parametrize(("held", "counts"), [(8, [0, 0, 0]), (5, [3, 3, 3]), (1e6, [0, 0, 0]), (None, [8, 8, 8])])
def test_as_few_as_the_memory_limit_demands_are_offloaded_and_gradients_are_those_of_eager(
    held: float | None, counts: list[int]
) -> None:
    """The limit is `held` micro-batches of the largest stage beside its parameters; where copies take no time, no more move."""
    x, reference, model = torch.randn(64, 64), net(), net()
    stages = offloading(net(), x, offload=False).plan.stages
    each, state = max(stage.held_bytes for stage in stages), max(stage.state_bytes for stage in stages)
    pipe = offloading(model, x, memory_limit=None if held is None else state + held * each)
    loss = pipe.step(x)
    torch.testing.assert_close(loss, accumulate(reference, x, 8, square_loss), rtol=0, atol=0)
    assert_same(model, reference, 0.0)
    assert offloaded_counts(pipe.schedule) == counts
    assert held is None or max(pipe.simulate().peak_memory) <= held * each + sum(r.nbytes for r in pipe.program.routes)


def test_a_limit_that_no_cut_keeps_without_offloading_is_kept_with_it() -> None:
    x = torch.randn(64, 64)
    stage = max(offloading(net(), x).plan.stages, key=lambda stage: stage.state_bytes)
    limit = stage.state_bytes + 3 * stage.held_bytes
    with pytest.raises(pc.InfeasibleError):
        offloading(net(), x, memory_limit=limit, offload=False)
    assert offloaded_counts(offloading(net(), x, memory_limit=limit).schedule) == [5, 5, 5]
    with pytest.raises(pc.InfeasibleError):
        offloading(net(), x, memory_limit=stage.state_bytes)


def test_a_schedule_by_name_and_one_of_the_user_are_offloaded() -> None:
    x = torch.randn(64, 64)
    for schedule, n_stages in (("1f1b", 3), ("zbv", 6), (pc.build_schedule("interleaved", 6, 8, n_devices=3), 6)):
        pipe = pc.compile(
            net(), n_stages, example_args=(x,), n_microbatches=8, loss_fn=square_loss, cost="analytic", offload=True,
            schedule=schedule, devices=["cpu"] * 3,
        )  # fmt: skip
        pipe.step(x)
        resident = schedule if isinstance(schedule, pc.Schedule) else pc.build_schedule(schedule, n_stages, 8)
        assert pipe.schedule == pc.insert_offload(resident)
