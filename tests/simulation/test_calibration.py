from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.ir.timeline import COMPUTE, Timeline
from pipecompile.schedules import build_schedule
from pipecompile.simulation.calibration import calibrate
from pipecompile.simulation.simulator import simulate


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "mario"])
def test_a_simulated_step_gives_its_own_costs(name: str) -> None:
    schedule = build_schedule(name, 3, 6)
    costs = {"forward": [1.0, 2.0, 1.5], "input_grad": [1.25, 0.5, 1.0], "weight_grad": [0.75, 1.0, 2.0]}
    step = simulate(schedule, **costs)
    assert simulate(schedule, **calibrate(step)).spans == step.spans


def test_each_cost_is_the_mean_of_its_stage() -> None:
    spans = [
        (0, "0F0", 0.0, 9.0),
        (0, "0F1", 9.0, 10.0),
        (0, "0F2", 10.0, 12.0),
        (1, "1F0", 3.0, 6.0),
        (0, "to 1", 0.0, 5.0),
    ]
    assert calibrate(Timeline.measured(spans, 2)) == {"forward": [4.0, 3.0]}


def test_what_has_no_actions_is_refused() -> None:
    with pytest.raises(InputError, match="a str is not a Timeline"):
        calibrate("measured")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the timeline has no actions"):
        calibrate(Timeline.measured([(0, "wait", 0.0, 1.0)], 1))
    assert COMPUTE == "compute"


@pytest.mark.parametrize("names", [("1F0",), ("0F0", "2F0"), ("0B0",), ("999999999F0",)])
def test_the_row_of_one_rank_is_refused(names: tuple[str, ...]) -> None:
    """Before, the stages of other ranks counted as 0 s."""
    with pytest.raises(InputError, match=r"the timeline has no forward of stage \d") as raised:
        calibrate(Timeline.measured([(0, name, 0.0, 1.0) for name in names], 3))
    assert "pipe.gathered()" in str(raised.value)


def test_seconds_below_zero_are_refused() -> None:
    with pytest.raises(InputError, match=r"the seconds of 0F0=-1\.0 is not"):
        calibrate(Timeline.measured([(0, "0F0", 1.0, 0.0)], 1))
