"""The Chrome trace: what the format demands, and what must be in it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from pipecompile.show.perfetto import timeline_trace

REQUIRED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "t": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
METADATA = {"process_name": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int}


def faults(text):
    """Everything in which the text is not the trace format; also slices that overlap and arrows into the void."""
    events = json.loads(text)["traceEvents"]
    found = [f"{e} lacks {gone}" for e in events if (gone := REQUIRED.get(e["ph"], {"known ph"}) - e.keys())]
    found += [
        f"{e} has a bad number" for e in events for key in ("ts", "dur", "pid", "tid") if not 0 <= e.get(key, 0) < 1e15
    ]
    for e in events:
        if e["ph"] == "M" and not isinstance(next(iter(e["args"].values())), METADATA.get(e["name"], type(None))):
            found.append(f"{e} is not metadata")
        if e["ph"] == "C" and not all(isinstance(v, int | float) for v in e["args"].values()):
            found.append(f"{e} counts no number")
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    tracks = {}
    for e in events:
        if e["ph"] == "X":
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    found += [f"thread {track} has no name" for track in tracks if track not in named]
    for track, slices in tracks.items():
        found += [f"{a} overlaps {b} on {track}" for a, b in pairwise(sorted(slices)) if b[0] < a[1] - 1e-6]
    for e in events:
        if e["ph"] in "stf" and sum(a < e["ts"] < b for a, b in tracks.get((e["pid"], e["tid"]), [])) != 1:
            found.append(f"{e} points at no slice or at several")
    return found


def test_the_trace_is_well_formed(predicted, measured, program):
    assert faults(timeline_trace(predicted, measured, program=program)) == []
    assert faults(timeline_trace(predicted)) == []


def test_the_validator_sees_a_missing_name_and_an_overlap(predicted):
    events = json.loads(timeline_trace(predicted))["traceEvents"]
    unnamed = [e for e in events if e["name"] != "thread_name"]
    doubled = [e | {"dur": e["dur"] * 3} if e["ph"] == "X" else e for e in events]
    assert any("has no name" in fault for fault in faults(json.dumps({"traceEvents": unnamed})))
    assert any("overlaps" in fault for fault in faults(json.dumps({"traceEvents": doubled})))


def test_a_process_per_device_with_predicted_over_measured(predicted, measured):
    events = json.loads(timeline_trace(predicted, measured, devices=("cuda:0", "cuda:1")))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = sorted((e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name" and e["pid"] == 1)
    assert names == {0: "device 0 · cuda:0", 1: "device 1 · cuda:1", 2: "device 2", 3: "device 3"}
    assert [name for _, name in threads] == [
        *("compute · predicted", "compute · measured"),
        *("to 0 · predicted", "to 0 · measured"),
        *("to 2 · predicted", "to 2 · measured"),
    ]


def test_both_timelines_start_at_zero_and_keep_their_lengths(predicted, measured):
    assert min(span.start for span in measured.spans) > 1.0
    events = json.loads(timeline_trace(predicted, measured))["traceEvents"]
    layer = {(e["pid"], e["tid"]): e["args"]["name"].split(" · ")[1] for e in events if e["name"] == "thread_name"}
    for name, timeline in (("predicted", predicted), ("measured", measured)):
        slices = [e for e in events if e["ph"] == "X" and layer[e["pid"], e["tid"]] == name]
        assert len(slices) == len(timeline.spans)
        assert min(e["ts"] for e in slices) == 0
        assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(timeline.makespan * 1e6, abs=0.01)


def test_memory_is_a_counter_per_device(predicted):
    events = json.loads(timeline_trace(predicted))["traceEvents"]
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["pid"] for e in counters} == {0, 1, 2, 3}
    assert max(e["args"]["bytes"] for e in counters if e["pid"] == 0) == predicted.peak_memory[0]
    assert not [e for e in json.loads(timeline_trace(replace(predicted, memory=())))["traceEvents"] if e["ph"] == "C"]


def test_an_arrow_leads_from_the_writer_over_the_copy_to_the_first_reader(predicted, program):
    """0F0 -> y0#0 -> 1F0      and back      1B0 -> y0'1#0 -> 0B0"""
    events = json.loads(timeline_trace(predicted, program=program))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]

    def under(e):
        return next(
            s["name"]
            for s in slices
            if (s["pid"], s["tid"]) == (e["pid"], e["tid"]) and s["ts"] < e["ts"] < s["ts"] + s["dur"]
        )

    arrows = {}
    for e in events:
        if e["ph"] in "stf":
            arrows.setdefault(e["id"], []).append((e["ph"], under(e)))
    assert len(arrows) == 2 * 3 * 8
    assert [("s", "0F0"), ("t", "y0#0"), ("f", "1F0")] in arrows.values()
    assert [("s", "1B0"), ("t", "y0'1#0"), ("f", "0B0")] in arrows.values()
