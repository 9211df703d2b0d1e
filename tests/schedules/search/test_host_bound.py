from __future__ import annotations

import pytest

from pipecompile.ir import chain
from pipecompile.schedules import build_schedule
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.host_bound import host_lower_bound
from pipecompile.schedules.search.workload import make_workload
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.simulator import simulate


def bound(recompute: bool = False, is_recomputed: tuple[bool, bool] = (False, False), **costs: object) -> float:
    checked = make_costs(2, 2, chain(2), **costs)  # type: ignore[arg-type]
    workload = make_workload(loop(2, 2), chain(2), checked, is_recomputed=is_recomputed)
    return host_lower_bound(workload, 5, checked, recompute=recompute)


def test_without_launches_and_shared_streams_it_is_0() -> None:
    assert bound() == 0.0
    assert bound(streams=[0, 1]) == 0.0


def test_one_thread_launches_for_all_devices_or_one_for_each() -> None:
    assert bound(launch=[1.0, 2.0]) == 5 * 3 * (1.0 + 2.0)
    assert bound(launch=[1.0, 2.0], hosts="device") == 5 * 3 * 2.0


def test_a_recomputed_stage_is_launched_once_more_where_it_has_to_be_recomputed() -> None:
    assert bound(launch=1.0, is_recomputed=(True, False)) == 5 * 7.0
    assert bound(launch=1.0, is_recomputed=(True, False), recompute=True) == 5 * 6.0


def test_devices_on_one_stream_compute_one_after_another() -> None:
    assert bound(streams=[3, 3]) == 5 * 2 * 3.0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "2bp"])
@pytest.mark.parametrize("hosts", ["one", "device"])
def test_no_schedule_of_the_catalogue_is_shorter(name: str, hosts: str) -> None:
    costs = {"launch": [1.5, 2.0], "hosts": hosts, "streams": [0, 0]}
    assert simulate(build_schedule(name, 2, 5), **costs).makespan >= bound(**costs)  # type: ignore[arg-type]
