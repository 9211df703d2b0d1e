"""Predicted beside measured: sums, differences, and what the difference of two steps consists of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.show.stage_comparison import comparison_columns, comparison_remarks, signed_share


def timeline(*cells: tuple[int, str, float, float]) -> Timeline:
    n_devices = 1 + max(device for device, *_ in cells)
    return Timeline(n_devices, tuple(Span(device, COMPUTE, *cell) for device, *cell in cells))


PREDICTED = timeline((0, "0F0", 0, 1), (1, "1F0", 1, 2), (1, "1B0", 2, 4), (0, "0B0", 4, 6))
MEASURED = timeline((0, "0F0", 0, 2), (1, "1F0", 2, 3), (1, "1B0", 3, 4), (0, "0B0", 5, 8))


def test_each_stage_has_its_seconds_of_the_whole_step() -> None:
    columns = comparison_columns(PREDICTED, MEASURED)
    assert columns["stage"] == (["0", "1"], "")
    assert columns["forward\npredicted, s"] == (["1.00", "1.00"], "2.00")
    assert columns["forward\nmeasured, s"] == (["2.00", "1.00"], "3.00")
    assert columns["forward\ndifference"] == (["+100.0%", "+0.0%"], "+50.0%")
    assert columns["backward\ndifference"] == (["+50.0%", "-50.0%"], "+0.0%")
    assert columns["all\nmeasured, s"] == (["5.00", "2.00"], "7.00")
    assert not any(name.startswith("recomputation") for name in columns)


def test_i_and_w_are_backward_and_r_is_recomputation() -> None:
    split = timeline((0, "0F0", 0, 1), (0, "0R0", 1, 2), (0, "0I0", 2, 3), (0, "0W0", 3, 5))
    columns = comparison_columns(split, split)
    assert columns["backward\npredicted, s"] == (["3.00"], "3.00")
    assert columns["recomputation\npredicted, s"] == (["1.00"], "1.00")


def test_a_stage_of_another_rank_has_a_dash_and_totals_are_of_what_is_measured() -> None:
    own = replace(MEASURED, spans=tuple(span for span in MEASURED.spans if span.device == 0))
    columns = comparison_columns(PREDICTED, own)
    assert columns["all\nmeasured, s"] == (["5.00", "-"], "5.00")
    assert columns["all\npredicted, s"] == (["3.00", "3.00"], "3.00")
    assert columns["all\ndifference"] == (["+66.7%", "-"], "+66.7%")


def test_the_difference_of_the_steps_is_compute_and_waiting() -> None:
    (line,) = comparison_remarks(PREDICTED, MEASURED)
    assert line == (
        "The step took 2.00 s longer than predicted (+33.3%). Device 0, which computed longest, "
        "computed 2.00 s longer and waited no longer."
    )
    faster = replace(MEASURED, spans=MEASURED.spans[:3])
    (line,) = comparison_remarks(PREDICTED, faster)
    assert line.startswith("The step took 2.00 s less than predicted (-33.3%). Device 1, ")
    assert line.endswith("computed 1.00 s less and waited 1.00 s less.")


def test_an_action_that_stands_out_is_named() -> None:
    rows = [(0, f"0F{i}", float(10 * i), 10.0 * i + (5 if i == 0 else 1)) for i in range(4)]
    assert "0F0 took 5.0 times the median of its kind in its stage: 4.00 s more." in comparison_remarks(
        timeline(*rows), timeline(*rows)
    )
    even = timeline(*((0, f"0F{i}", float(i), i + 1.0) for i in range(4)))
    assert not any("median" in line for line in comparison_remarks(even, even))


@pytest.mark.parametrize(("dispatch", "word"), [("inline", "One thread"), ("threads", "share the cores"), ("", "")])
def test_what_devices_of_one_cpu_share_is_said(dispatch: str, word: str) -> None:
    lines = comparison_remarks(PREDICTED, MEASURED, dispatch=dispatch, devices=("cpu", "cpu"))
    assert len(lines) == 1 + bool(word)
    assert word in lines[-1]
    assert len(comparison_remarks(PREDICTED, MEASURED, dispatch=dispatch, devices=("cuda:0", "cuda:1"))) == 1


def test_nothing_predicted_has_no_share() -> None:
    assert signed_share(0.0, 1.0) == "-"
    assert signed_share(2.0, 1.0) == "-50.0%"
