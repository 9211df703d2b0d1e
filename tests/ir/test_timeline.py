from __future__ import annotations

import json
from pathlib import Path

import pytest

import pipecompile as pc
from pipecompile.ir.timeline import COMPUTE, Span, Timeline

#   device 0   │ 0F0   │       │ 0B0   │
#   to 1       │       │ v0#0  │       │
#   device 1   │                       │ (nothing before 6) 1F0 │
TIMELINE = Timeline(
    n_devices=2,
    spans=(
        Span(0, COMPUTE, "0B0", 4.0, 6.0),
        Span(0, COMPUTE, "0F0", 1.0, 3.0),
        Span(0, "to 1", "v0#0", 3.0, 4.0),
        Span(1, COMPUTE, "1F0", 6.0, 9.0),
    ),
    memory=(((1.0, 8.0), (3.0, 12.0), (6.0, 0.0)), ()),
    peak_in_flight=(1.0, 0.0),
)


def test_compute_spans_come_in_order_of_their_start() -> None:
    assert [span.name for span in TIMELINE.compute(0)] == ["0F0", "0B0"]


def test_makespan_is_over_all_devices_and_span_over_the_longest_one() -> None:
    assert (TIMELINE.makespan, TIMELINE.span) == (8.0, 5.0)


def test_bubble_is_what_is_not_compute() -> None:
    assert TIMELINE.busy == 7.0
    assert TIMELINE.bubble == pytest.approx(1 - 7 / 16)


def test_peak_memory_is_the_top_of_each_curve() -> None:
    assert TIMELINE.peak_memory == (12.0, 0.0)


def test_an_empty_timeline_has_no_length() -> None:
    empty = Timeline(2, ())
    assert (empty.makespan, empty.span, empty.busy, empty.bubble, empty.peak_memory) == (0.0, 0.0, 0.0, 0.0, ())


def test_repr_is_one_short_line() -> None:
    assert repr(TIMELINE) == "Timeline(n_devices=2, n_spans=4, makespan=8, bubble=56.2%)"


def test_a_measured_timeline_begins_at_zero() -> None:
    measured = Timeline.measured([(1, "1F0", 7.0, 9.0), (0, "0F0", 5.0, 6.5)], 3)
    assert measured.spans == (Span(1, COMPUTE, "1F0", 2.0, 4.0), Span(0, COMPUTE, "0F0", 0.0, 1.5))
    assert measured.spans_of_devices == (1.5, 2.0, 0.0)


def test_a_timeline_is_saved_as_a_trace_and_drawn(tmp_path: Path) -> None:
    timeline = pc.simulate(pc.build_schedule("1f1b", 2, 3))
    timeline.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 12
    figure = timeline.plot(seconds=False)
    figure.savefig(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size
    with pytest.raises(pc.InputError, match=r"(?s)step\.json.*savefig"):
        timeline.save(tmp_path / "step.svg")
    with pytest.raises(pc.InputError, match="cannot be written"):
        timeline.save(tmp_path / "step.json" / "step.json")
