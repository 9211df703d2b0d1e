"""The report's page simulates as we do: makespan, bubble and memory of a schedule's program, in the browser's code and in ours."""

from __future__ import annotations

import json

import pytest
from pages import run_script, scripts

from pipecompile.ir import HOST, Route
from pipecompile.passes import lower
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.schedules import CATALOGUE, build_schedule
from pipecompile.simulation.simulator import simulate

SHAPES = ((1, 3), (3, 4), (4, 9))


def routes_of(n_stages):
    """Return a chain, values that skip stages, and values from and to the host, of unequal sizes."""
    last = n_stages - 1
    chain = [Route(f"v{s}", s, (s + 1,), 10.0 + s) for s in range(last)]
    skip = [Route("skip", 0, tuple(sorted({last // 2 or 1, last})), 7.0)] if last > 1 else []
    host = [Route("x", HOST, tuple(sorted({0, last})), 3.0, gradient=False), Route("y", last, (HOST,), 2.0)]
    return (*chain, *skip, *host)


def costs_of(n_stages):
    stages = range(n_stages)
    return {
        "forward": [1 + 0.1 * (s * 7 % 5) for s in stages],
        "backward": [2.1 + 0.1 * (s % 5) for s in stages],
        "input_grad": [1.5 + 0.2 * (s % 3) for s in stages],
        "weight_grad": [0.7 + 0.1 * (s % 4) for s in stages],
        "saved_bytes": [100.0 + s for s in stages],
        "weight_saved_bytes": [40.0 + s for s in stages],
    }


def page_case(schedule, routes, costs, transfer, lingers):
    """Return the arguments of the page's `simulateOrder`."""
    keys = ("forward", "backward", "input_grad", "weight_grad", "saved_bytes", "weight_saved_bytes")
    short = dict(zip(("forward", "backward", "input", "weight", "saved", "kept"), map(costs.get, keys), strict=True))
    crossing = [
        {
            "source": r.source,
            "ends": r.consumers,
            "nbytes": r.nbytes,
            "gradient": r.gradient,
            "seconds": transfer[r.value],
        }
        for r in routes
    ]
    return {
        "placement": schedule.placement, "csv": schedule.to_csv(), "costs": short | {"routes": crossing}, "lingers": lingers,
    }  # fmt: skip


def simulated_in_the_page(cases):
    source = (scripts() / "simulate.js").read_text()
    return run_script(
        f"{source}\nconst found = {json.dumps(cases)}.map((c) => simulateOrder({{placement: c.placement, rows: "
        "parseRows(c.csv)}, c.costs, c.lingers));\n"
        "console.log(JSON.stringify(found.map((f) => [f.makespan, f.bubble, f.peaks])));"
    )


def compared_schedules():
    for name, entry in CATALOGUE.items():
        if entry.compared or name == "forward":
            for devices, microbatches in SHAPES:
                yield build_schedule(name, (entry.chunks or 2) * devices, microbatches, n_devices=devices)
    yield insert_recompute(build_schedule("1f1b", 3, 5), "always")
    yield insert_recompute(build_schedule("interleaved", 4, 4, n_devices=2), "except_last")


@pytest.mark.parametrize("lingers", [False, True])
def test_the_page_simulates_programs_as_we_do(lingers):
    """Every schedule of the catalogue under unequal costs, with skips, inputs and outputs, and with recomputation."""
    cases, expected = [], []
    for schedule in compared_schedules():
        routes, costs = routes_of(schedule.n_stages), costs_of(schedule.n_stages)
        transfer = {route.value: 0.3 * (index % 3) for index, route in enumerate(routes)}
        cases.append(page_case(schedule, routes, costs, transfer, lingers))
        program = lower(schedule, routes, overlap=lingers, sums="eager")
        timeline = simulate(program, transfer=transfer, **costs)
        expected.append((timeline.makespan, timeline.bubble, list(timeline.peak_memory)))
    for case, (makespan, bubble, peaks), (ours, our_bubble, our_peaks) in zip(
        cases, simulated_in_the_page(cases), expected, strict=True
    ):
        assert makespan == pytest.approx(ours), case["csv"]
        assert bubble == pytest.approx(our_bubble), case["csv"]
        assert peaks == pytest.approx(our_peaks), case["csv"]


def test_an_order_that_waits_for_ever_has_no_timeline():
    source = (scripts() / "simulate.js").read_text()
    costs = {key: [1, 1] for key in ("forward", "backward", "input", "weight", "saved", "kept")}
    costs["routes"] = [{"source": 0, "ends": [1], "nbytes": 1, "gradient": True, "seconds": 1}]
    order = 'rows: parseRows("0F0,0B0,0F1,0B1\\n1F1,1B1,1F0,1B0")'
    assert (
        run_script(
            f"{source}\nconsole.log(JSON.stringify(simulateOrder({{placement: [0, 1], {order}}}, {json.dumps(costs)})))"
        )
        is None
    )
