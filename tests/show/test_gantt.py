"""The Gantt chart: what is written in it, that it is reproducible, and that matplotlib is left as it was."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib as mpl
import pytest

from pipecompile.ir import Schedule
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.show.gantt import timeline_figure, timeline_svg
from pipecompile.simulation.simulator import simulate


def words(svg):
    """All texts of the picture."""
    return ["".join(node.itertext()).strip() for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_title_rows_cells_and_peaks_are_written_down(predicted):
    found = words(timeline_svg(predicted, title="1f1b, 4 stages", devices=("cuda:0", "cuda:1", "cuda:2", "cuda:3")))
    assert "1f1b, 4 stages" in found
    assert f"predicted: makespan 36.2 ms, bubble {predicted.bubble:.1%}" in found
    assert [word for word in found if "cuda" in word] == ["0 · cuda:0", "1 · cuda:1", "2 · cuda:2", "3 · cuda:3"]
    assert {"forward", "backward", "copy"} <= set(found)
    assert "0: peak 52.0 MiB" in found
    assert "time, ms" in found
    assert "number: micro-batch" in found


def test_every_cell_bears_its_micro_batch(predicted):
    bare = replace(predicted, memory=())
    figure = timeline_figure(bare)
    cells = sorted(text.get_text() for text in figure.axes[0].texts)
    assert cells == sorted(str(m) for m in range(8) for _ in range(4 * 2))


def test_every_cell_bears_its_slice():
    figure = timeline_figure(simulate(Schedule.from_csv("0F0.0,0F0.1,0B0.1,0B0.0\n")))
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.0", "0.1", "0.1", "0.0"]


def test_cells_and_copies_are_drawn_where_they_happen(predicted):
    figure = timeline_figure(predicted)
    (row, *_) = figure.axes
    drawn = [
        path.get_extents()
        for bars in row.collections
        if type(bars).__name__ == "PolyCollection"
        for path in bars.get_paths()
    ]
    assert len(drawn) == len(predicted.spans)
    for span in predicted.spans:
        same = [
            box
            for box in drawn
            if box.x0 == pytest.approx(span.start * 1e3) and box.x1 == pytest.approx(span.end * 1e3)
        ]
        assert any(span.device < box.y0 and box.y1 < span.device + 1 for box in same), span


def test_a_measured_run_stands_below_on_a_time_axis_of_its_own(predicted, measured):
    figure = timeline_figure(predicted, measured)
    ends = [axes.get_xlim()[1] for axes in figure.axes]
    assert ends == pytest.approx([36.2 * 1.002] * 2 + [43.4 * 1.002] * 2, rel=1e-2)
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "time, ms"] * 2


def test_stages_of_one_device_have_their_own_shade():
    spans = tuple(Span(0, COMPUTE, f"{s}F0", float(s), s + 1.0) for s in (0, 2))
    svg = timeline_svg(Timeline(1, spans), seconds=False)
    shades = {colour for colour in ("#8fbbea", "#5f95d6", "#3f72b5") if colour in svg}
    assert shades == {"#8fbbea", "#5f95d6"}
    assert "time, in units of the costs" in words(svg)
    assert "number: micro-batch · darker: later stage of the device" in words(svg)


def test_the_same_timeline_gives_the_same_bytes_whatever_the_users_style(predicted):
    first = timeline_svg(predicted)
    with mpl.rc_context({"axes.facecolor": "black", "font.size": 30, "svg.hashsalt": "other"}):
        assert timeline_svg(predicted) == first
    assert "<dc:date>" not in first


@pytest.mark.parametrize("name", ["$x^$", "$\\nosuch{$", "a_{$b$}", "<b>&amp;"])
def test_names_are_drawn_as_they_are(predicted, name):
    svg = timeline_svg(predicted, title=name, devices=[name])
    assert any(name in (text or "") for text in ET.fromstring(svg).itertext())


def test_matplotlib_is_left_as_it_was(predicted):
    before = dict(mpl.rcParams)
    timeline_svg(predicted)
    assert dict(mpl.rcParams) == before


def test_an_empty_timeline_and_one_of_zero_length_are_drawn():
    assert "predicted: makespan 0 ns, bubble 0.0%" in words(timeline_svg(Timeline(2, ())))
    assert "device 0" in words(timeline_svg(Timeline(1, (Span(0, COMPUTE, "0F0", 1.0, 1.0),), ((),))))


def test_matplotlib_is_imported_only_to_draw():
    code = (
        "import sys\nimport pipecompile.show\nprint([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_kind_of_action_has_its_colour():
    timeline = simulate(Schedule.from_csv("0F0,0F1,0R0,0I0,0W0,0B1\n"))
    assert {"forward", "recompute", "backward", "input grad", "weight grad"} <= set(words(timeline_svg(timeline)))
