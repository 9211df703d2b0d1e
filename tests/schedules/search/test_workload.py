from __future__ import annotations

from pipecompile.ir import HOST, Route
from pipecompile.schedules.search.workload import Parcel, unit_work, work_of
from pipecompile.simulation.costs import make_costs


def test_parcels_go_once_to_each_device_and_gradients_back_to_the_source() -> None:
    routes = (Route("x", HOST, (0,)), Route("a", 0, (1, 2, 3, HOST), 10.0), Route("m", 1, (2,), gradient=False))
    costs = make_costs(4, 3, routes, latency=1.0, bandwidth=10.0)
    work = work_of((0, 1, 2, 1), routes, costs)
    assert work.ahead[0] == (Parcel(1, 2.0, (1, 3)), Parcel(2, 2.0, (2,)))
    assert work.ahead[1] == (Parcel(2, 1.0, (2,)),)
    assert work.back[1:] == tuple((Parcel(0, 2.0, (0,)),) for _ in range(3))
    assert work.back[0] == ()


def test_within_a_device_a_parcel_takes_no_time() -> None:
    routes = (Route("a", 0, (1,), 10.0),)
    work = work_of((0, 0), routes, make_costs(2, 1, routes, latency=1.0))
    assert (work.ahead[0], work.back[1]) == ((Parcel(0, 0.0, (1,)),), (Parcel(0, 0.0, (0,)),))


def test_unit_work_is_a_chain() -> None:
    work = unit_work((0, 1, 1, 0))
    assert (work.n_stages, work.n_devices) == (4, 2)
    assert [parcel.stages for parcels in work.ahead for parcel in parcels] == [(1,), (2,), (3,)]
