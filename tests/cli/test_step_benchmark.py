"""`bench` times the pipeline and a plain loop in turns, without the first two steps."""

from __future__ import annotations

import pytest

from pipecompile.cli.step_benchmark import prediction_remark


def test_both_sides_are_timed(real, models):
    words = ("bench", "mymodels:small", "--input", "12x8", "--stages", "2", "--cost", "analytic", "--steps", "3")
    outcome = real(*words, "--json")
    assert outcome.code == 0
    assert {name: len(each) for name, each in outcome.json["seconds"].items()} == {"pipeline": 3, "eager loop": 3}
    assert outcome.json["samples"] == 12
    assert outcome.json["predicted"] > 0
    assert "samples/s" in real(*words).out


@pytest.mark.parametrize(
    ("measured", "predicted", "cost", "words"),
    [
        (1.2, 1.0, "profile", ""),
        (1.0, 1.4, "analytic", ""),
        (1.0, 0.0, "analytic", ""),
        (15.0, 1.0, "analytic", "15 times too short: its times are peaks of a data sheet"),
        (1.0, 3.0, "analytic and user", "3 times too long"),
        (3.0, 1.0, "profile", "Try again on an idle machine"),
    ],
)
def test_a_prediction_far_off_has_a_remark(measured: float, predicted: float, cost: str, words: str) -> None:
    remark = prediction_remark(measured, predicted, cost)
    assert words in remark
    assert bool(remark) == bool(words)


def test_the_remark_is_printed_below_the_table(real, models):
    outcome = real("bench", "mymodels:small", "--input", "12x8", "--stages", "2", "--cost", "analytic", "--steps", "3")
    assert "times too short" in outcome.out
    assert "Try --cost profile" in outcome.out
