"""Swaps on the critical path shorten a schedule, and never give a longer one, or one that is not accepted."""

from __future__ import annotations

from pipecompile.ir import Schedule, chain
from pipecompile.schedules import build_schedule
from pipecompile.schedules.search.critical_swaps import improve
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify


def improved(schedule: Schedule, walks: int = 500, *, fits: bool = True, target: float = 0.0) -> Schedule:
    routes = chain(schedule.n_stages)
    costs = make_costs(schedule.n_stages, schedule.n_devices, routes)
    return improve(schedule, routes, costs, lambda device, row: fits, target=target, walks=walks)


def test_gpipe_s_order_on_the_last_device_is_mended() -> None:
    """I and W in GPipe's order waste time that an order of I first does not."""
    bad = Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1\n")
    better = improved(bad)
    verify(better)
    assert simulate(better).makespan < simulate(bad).makespan
    assert sorted(map(str, better.rows[1])) == sorted(map(str, bad.rows[1]))


def test_it_stops_where_it_may_not_go_on() -> None:
    schedule = build_schedule("gpipe", 3, 4)
    assert improved(schedule, walks=1) == schedule
    assert improved(schedule, fits=False) == schedule
    assert improved(schedule, target=1e9) == schedule


def test_it_never_makes_things_worse() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved"):
        schedule = build_schedule(name, 4, 5)
        better = improved(schedule, walks=200)
        verify(better)
        assert simulate(better).makespan <= simulate(schedule).makespan


def test_a_shorter_schedule_that_is_not_accepted_loses_no_earlier_one() -> None:
    """A last one beyond the memory, once its values counted, threw all away: more effort gave a longer schedule."""
    rows = [[f"{s}F{m}" for m in range(4)] + [f"{s}{kind}{m}" for m in range(4) for kind in "IW"] for s in range(3)]
    schedule = Schedule.from_csv("\n".join(",".join(row) for row in rows))
    routes, asked = chain(3), list[Schedule]()
    costs = make_costs(3, 3, routes)

    def shortest(accepts) -> float:
        found = improve(schedule, routes, costs, lambda device, row: True, target=0.0, walks=2000, accepts=accepts)
        return simulate(found).makespan

    best = shortest(lambda shorter: not asked.append(shorter))
    lengths = sorted({simulate(each).makespan for each in asked})
    assert best == lengths[0]
    assert len(lengths) > 1
    assert shortest(lambda shorter: simulate(shorter).makespan > best) == lengths[1]
    assert shortest(lambda _: False) == simulate(schedule).makespan
