"""`bench` times the pipeline and a plain loop in turns, without the first two steps."""

from __future__ import annotations


def test_both_sides_are_timed(real, models):
    words = ("bench", "mymodels:small", "--input", "12x8", "--stages", "2", "--cost", "analytic", "--steps", "3")
    outcome = real(*words, "--json")
    assert outcome.code == 0
    assert {name: len(each) for name, each in outcome.json["seconds"].items()} == {"pipeline": 3, "eager loop": 3}
    assert outcome.json["samples"] == 12
    assert outcome.json["predicted"] > 0
    assert "samples/s" in real(*words).out
