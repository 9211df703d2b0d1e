from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import HOST, Route
from pipecompile.schedules.search.workload import (
    Transfer,
    make_workload,
    unit_workload,
    with_free_recompute,
    without_values,
)
from pipecompile.simulation.costs import make_costs


def test_parcels_go_once_to_each_device_and_gradients_back_to_the_source() -> None:
    routes = (Route("x", HOST, (0,)), Route("a", 0, (1, 2, 3, HOST), 10.0), Route("m", 1, (2,), gradient=False))
    costs = make_costs(4, 3, routes, latency=1.0, bandwidth=10.0)
    work = make_workload((0, 1, 2, 1), routes, costs)
    assert work.forward_transfers[0] == (Transfer(1, 2.0, (1, 3), "a", 10.0), Transfer(2, 2.0, (2,), "a", 10.0))
    assert work.forward_transfers[1] == (Transfer(2, 1.0, (2,), "m"),)
    assert work.gradient_transfers[1:] == tuple((Transfer(0, 2.0, (0,), "a", 10.0),) for _ in range(3))
    assert work.gradient_transfers[0] == ()


def test_within_a_device_a_parcel_takes_no_time() -> None:
    routes = (Route("a", 0, (1,), 10.0),)
    work = make_workload((0, 0), routes, make_costs(2, 1, routes, latency=1.0))
    assert (work.forward_transfers[0], work.gradient_transfers[1]) == (
        (Transfer(0, 0.0, (1,), "a", 10.0),),
        (Transfer(0, 0.0, (0,), "a", 10.0),),
    )


def test_values_do_not_count_where_micro_batches_do() -> None:
    routes = (Route("a", 0, (1,), 10.0),)
    work = without_values(make_workload((0, 1), routes, make_costs(2, 2, routes)))
    assert (work.forward_transfers[0], work.gradient_transfers[1]) == (
        (Transfer(1, 0.0, (1,), "a"),),
        (Transfer(0, 0.0, (0,), "a"),),
    )


def test_recomputation_may_be_free_of_charge() -> None:
    work = with_free_recompute(replace(unit_workload((0, 1)), recipe=(0.25, 2.0), is_recomputed=(True, True)))
    assert (work.saved, work.is_recomputed) == ((0.25, 1.0), (False, False))


def test_unit_work_is_a_chain() -> None:
    work = unit_workload((0, 1, 1, 0))
    assert (work.n_stages, work.n_devices) == (4, 2)
    assert [transfer.stages for transfers in work.forward_transfers for transfer in transfers] == [(1,), (2,), (3,)]
