from __future__ import annotations

from pipecompile.ir import HOST, Route
from pipecompile.schedules.search.workload import Transfer, make_workload, unit_workload
from pipecompile.simulation.costs import make_costs


def test_parcels_go_once_to_each_device_and_gradients_back_to_the_source() -> None:
    routes = (Route("x", HOST, (0,)), Route("a", 0, (1, 2, 3, HOST), 10.0), Route("m", 1, (2,), gradient=False))
    costs = make_costs(4, 3, routes, latency=1.0, bandwidth=10.0)
    work = make_workload((0, 1, 2, 1), routes, costs)
    assert work.forward_transfers[0] == (Transfer(1, 2.0, (1, 3)), Transfer(2, 2.0, (2,)))
    assert work.forward_transfers[1] == (Transfer(2, 1.0, (2,)),)
    assert work.gradient_transfers[1:] == tuple((Transfer(0, 2.0, (0,)),) for _ in range(3))
    assert work.gradient_transfers[0] == ()


def test_within_a_device_a_parcel_takes_no_time() -> None:
    routes = (Route("a", 0, (1,), 10.0),)
    work = make_workload((0, 0), routes, make_costs(2, 1, routes, latency=1.0))
    assert (work.forward_transfers[0], work.gradient_transfers[1]) == (
        (Transfer(0, 0.0, (1,)),),
        (Transfer(0, 0.0, (0,)),),
    )


def test_unit_work_is_a_chain() -> None:
    work = unit_workload((0, 1, 1, 0))
    assert (work.n_stages, work.n_devices) == (4, 2)
    assert [transfer.stages for transfers in work.forward_transfers for transfer in transfers] == [(1,), (2,), (3,)]
