"""The host as a resource: one thread that launches for all devices, or one per device."""

from __future__ import annotations

import pytest

import pipecompile as pc
from pipecompile.errors import InputError
from pipecompile.ir import HOST, Route, chain
from pipecompile.passes import lower
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.from_schedule import tasks_of_schedule
from pipecompile.simulation.host_launches import walk_with_hosts


@pytest.mark.parametrize(("launch", "speed_up"), [(0.0, 6.38), (0.2, 4.62)])
def test_one_thread_that_launches_for_eight_devices_is_the_bottleneck(launch: float, speed_up: float) -> None:
    """Before, simulate() knew no host: 6.38 times one device, where 4.62 times is all that one thread can launch."""
    program = lower(pc.build_schedule("1f1b", 8, 32), chain(8), overlap=True)
    for simulated in (pc.simulate, pc.simulate_launches):
        makespan = simulated(program, transfer=0.05, launch=launch).makespan
        assert 3 * 8 * 32 / makespan == pytest.approx(speed_up, abs=0.02)


def test_a_thread_per_device_launches_as_fast_as_its_device_computes() -> None:
    program = lower(pc.build_schedule("1f1b", 8, 32), chain(8), overlap=True)
    without = pc.simulate(program, transfer=0.05).makespan
    for simulated in (pc.simulate, pc.simulate_launches):
        assert simulated(program, transfer=0.05, launch=0.2, hosts="device").makespan == pytest.approx(
            without, rel=0.01
        )


def test_a_cell_ends_after_its_launch() -> None:
    """Two devices, one micro-batch, launches of 3 seconds for forwards of 1 and 6 for backwards of 2."""
    timeline = pc.simulate(pc.build_schedule("gpipe", 2, 1), launch=3.0)
    assert [(s.name, s.start, s.end) for s in timeline.spans] == [
        ("0F0", 0.0, 3.0), ("0B0", 12.0, 18.0), ("1F0", 3.0, 6.0), ("1B0", 6.0, 12.0)
    ]  # fmt: skip


def test_advice_names_launching_where_it_is_the_bottleneck() -> None:
    schedule = pc.build_schedule("1f1b", 8, 32)
    first, *_ = pc.advise(schedule, launch=0.4, faster=0.5)
    assert first.place == "host"
    assert first.saved > 0.4 * first.makespan
    assert "launching: if it took 0.5 of its time less" in str(first)
    assert "cuda_graphs=True" in str(first)
    assert all(one.place != "host" for one in pc.advise(schedule))


def test_an_unknown_kind_of_host_is_refused() -> None:
    with pytest.raises(InputError, match="hosts='many' is not known"):
        pc.simulate(pc.build_schedule("gpipe", 2, 1), launch=1.0, hosts="many")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_devices_on_one_stream_compute_one_after_another(name: str) -> None:
    """Before, four pipeline devices on one GPU were simulated as four GPUs."""
    schedule = pc.build_schedule(name, 4, 8, n_devices=2 if name == "interleaved" else 4)
    n = schedule.n_devices
    for subject in (schedule, lower(schedule)):
        alone = pc.simulate(subject, streams=[0] * n)
        assert alone.makespan == alone.busy
        assert pc.simulate(subject, streams=range(n)).makespan == pc.simulate(subject).makespan < alone.makespan
    halves = pc.simulate(lower(schedule), streams=[d // (n // 2) for d in range(n)])
    assert pc.simulate(schedule).makespan <= halves.makespan < alone.makespan


def test_streams_are_one_per_device() -> None:
    with pytest.raises(InputError, match="streams has 1 number for 2 devices"):
        pc.simulate(pc.build_schedule("gpipe", 2, 1), streams=[0])


def test_a_walk_with_hosts_can_be_repeated() -> None:
    """The order of the launches is that of the starts without a host, whatever the walk before has left in the tasks."""
    schedule = pc.build_schedule("1f1b", 2, 4)
    costs = make_costs(2, 2, chain(2), launch=0.8, streams=[0, 0])
    tasks = tasks_of_schedule(schedule, chain(2), costs)
    first = walk_with_hosts(schedule, tasks, costs)
    again = walk_with_hosts(schedule, tasks, costs)
    assert first.end == again.end
    assert first.makespan == pc.simulate(schedule, launch=0.8, streams=[0, 0]).makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_a_step_in_one_launch(name: str) -> None:
    """One launch of the longest time, whatever the number of cells; what is launched is what is predicted."""
    schedule = pc.build_schedule(name, 4, 8, n_devices=2 if name == "interleaved" else 4)
    inputs = [Route("x", HOST, (0,), 1.0, gradient=False)]
    program = lower(schedule, (*chain(4), *inputs), overlap=True)
    costs = {"transfer": 0.1, "host_latency": 0.3}
    free = pc.simulate(program, **costs).makespan
    for launch in ([0.1, 0.2, 0.3, 0.2], 0.9):
        whole = pc.simulate(program, **costs, launch=launch, hosts="step")
        assert whole.makespan == pytest.approx(free)  # shorter than the first cell with its copy
        assert pc.simulate_launches(program, **costs, launch=launch, hosts="step").makespan == pytest.approx(free)
    assert pc.simulate(program, **costs, launch=0.9).makespan > free + 1
    late = pc.simulate(program, **costs, launch=1000.0, hosts="step").makespan
    assert late == pytest.approx(pc.simulate_launches(program, **costs, launch=1000.0, hosts="step").makespan)
    assert late >= 1000.0


def test_no_search_bound_counts_the_cells_of_a_step_in_one_launch() -> None:
    found = pc.auto_schedule(2, 4, launch=5.0, hosts="step")
    assert pc.simulate(found, launch=5.0, hosts="step").makespan >= found.certificate.bound - 1e-9  # type: ignore[union-attr]
    assert pc.simulate(found, launch=5.0, hosts="step").makespan < pc.simulate(found, launch=5.0).makespan / 4


@pytest.mark.parametrize("hosts", ["one", "device"])
def test_copies_and_collectives_launch_no_kernels(hosts: str) -> None:
    """Before, each OFFLOAD, RELOAD, UNSHARD, RESHARD and REDUCE_GRAD took the host as long as a forward: 67 s for 49."""
    plain = pc.build_schedule("1f1b", 3, 6)
    offloads = pc.insert_sharding(pc.insert_offload(plain))
    seconds = pc.simulate(plain, launch=0.9, hosts=hosts).makespan
    assert pc.simulate(offloads, launch=0.9, hosts=hosts).makespan == pytest.approx(seconds)
    program = lower(offloads, overlap=True)
    launched = pc.simulate_launches(program, launch=0.9, hosts=hosts).makespan
    assert launched == pytest.approx(pc.simulate(lower(plain, overlap=True), launch=0.9, hosts=hosts).makespan)
