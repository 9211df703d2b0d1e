from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.stages import routes
from pipecompile.ir import Schedule
from pipecompile.ir.what_if import Order, RouteCosts, StageCosts
from pipecompile.planning.alternatives import unit_what_if, what_if
from pipecompile.schedules import CATALOGUE, build_schedule
from pipecompile.simulation.simulator import simulate


@pytest.fixture(scope="module")
def pipe():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)])
    return pc.compile(
        model, 3, devices=["cpu"] * 3, example_args=(torch.randn(6, 8),), n_microbatches=6, cost="analytic",
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip


def crossing(routes, seconds=0.0):
    return [RouteCosts(r.source, r.consumers, r.nbytes, r.gradient, seconds) for r in routes]


def found_for(pipe, problem=None, seconds=0.0):
    def of_cut(stage_of, n_stages):
        return crossing(routes(pipe._inspection().graph, stage_of), seconds)

    return what_if(pipe.plan, problem, pipe.schedule, crossing(pipe.program.routes, seconds), of_cut)


def test_every_cut_has_the_whole_work_and_more_stages_than_pieces_are_left_out(pipe):
    found = found_for(pipe, pipe.problem)
    assert set(found.costs) == {2, 3, 4, 6, 8}
    whole = sum(stage.forward for stage in pipe.plan.stages), sum(stage.backward for stage in pipe.plan.stages)
    for count, costs in found.costs.items():
        assert {len(getattr(costs, name)) for name in StageCosts.__slots__ if name != "routes"} == {count}
        assert sum(costs.forward) == pytest.approx(whole[0])
        assert sum(costs.backward) == pytest.approx(whole[1])
        assert sum(costs.input_grad) + sum(costs.weight_grad) == pytest.approx(whole[1])
        inner = [r for r in costs.routes if r.gradient and r.source >= 0]
        received = sum(r.nbytes * sum(end >= 0 for end in r.ends) for r in inner)
        saved = sum(costs.saved) - (
            received if count != pipe.plan.n_stages else sum(s.received_bytes for s in pipe.plan.stages)
        )
        assert saved == pytest.approx(sum(stage.saved_bytes for stage in pipe.plan.stages))


def test_its_own_order_comes_first_and_none_twice(pipe):
    found = found_for(pipe, pipe.problem)
    assert found.orders[0] == Order("1f1b", 3, 6, (0, 1, 2), pipe.schedule.to_csv()) == found.own
    keys = [(order.name, order.devices, order.microbatches, len(order.placement)) for order in found.orders]
    assert len(set(keys)) == len(keys)
    assert {order.devices for order in found.orders} == {2, 3, 4, 8}  # sixteen stages are more than it has layers
    for order in found.orders[::7]:
        assert Schedule.from_csv(order.csv).placement == order.placement


def test_what_crosses_is_that_of_the_program_and_of_the_new_cut(pipe):
    found = found_for(pipe, pipe.problem, 0.5)
    assert found.costs[3].routes == tuple(crossing(pipe.program.routes, 0.5))
    assert [(r.source, r.ends) for r in found.costs[4].routes if r.gradient and r.source >= 0][:3] == [
        (0, (1,)), (1, (2,)), (2, (3,)),
    ]  # fmt: skip


def test_without_a_problem_or_a_model_the_work_is_shared_evenly(pipe):
    found = found_for(pipe)
    assert found.costs[8].forward == pytest.approx((sum(stage.forward for stage in pipe.plan.stages) / 8,) * 8)
    alone = unit_what_if(build_schedule("1f1b", 4, 8))
    assert sum(alone.costs[16].input_grad) == 4
    assert alone.costs[4].forward == (1.0,) * 4


def test_a_step_that_is_long_leaves_room_for_few_others():
    schedule = build_schedule("interleaved", 64, 256, n_devices=32)
    found = unit_what_if(schedule)
    assert found.own.csv == schedule.to_csv()
    assert all(order.devices * order.microbatches <= 256 for order in found.orders[1:])
    assert len(found.orders) > 100
    assert simulate(Schedule.from_csv(found.own.csv)).makespan > 0


def test_a_schedule_that_is_registered_later_is_among_them_and_one_that_is_gone_is_not():
    def names():
        return {order.name for order in unit_what_if(build_schedule("1f1b", 4, 8)).orders}

    before = names()
    with patch.dict(CATALOGUE):
        pc.register_schedule(
            "mine", lambda n, m, p: replace(build_schedule("gpipe", n, m, n_devices=p), name="mine"), chunks=1
        )
        assert names() == before | {"mine"}
    assert names() == before
