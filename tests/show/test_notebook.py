from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pipecompile.show.notebook  # noqa: F401 registers the formatters
from pipecompile.ir import Schedule
from pipecompile.ir.timeline import Timeline
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule


def parsed(html: str) -> ET.Element:
    """Raises when a tag is left open or a sign is not escaped."""
    return ET.fromstring(f"<all>{html}</all>".replace(" xmlns='http://www.w3.org/2000/svg'", ""))


def test_a_schedule_shows_its_cells(schedule: Schedule) -> None:
    html = schedule._repr_html_()
    titles = [title.text.split(":")[0] for title in parsed(html).iter("title")]
    assert sorted(titles) == sorted(str(action) for row in schedule.rows for action in row)
    assert "1f1b</b>, 4 stages on 4 devices, 8 micro-batches" in html


def test_slices_are_named_and_counted() -> None:
    html = build_schedule("seq1f1b", 2, 2, n_slices=2)._repr_html_()
    root = parsed(html)
    assert "2 stages on 2 devices, 2 micro-batches of 2 slices; slices in flight per device: 3 2" in html
    assert "1F1.1" in {title.text.split(":")[0] for title in root.iter("title")}
    assert "1.1" in {text.text for text in root.iter("text")}


def test_what_is_wrong_with_a_schedule_is_said_instead() -> None:
    html = Schedule.from_csv("0F0,0B0\n1B0,1F0\n")._repr_html_()
    assert "not legal" in html
    assert "1B0,1F0" in html
    parsed(html)


def test_a_timeline_shows_copies_and_a_long_one_its_beginning(predicted: Timeline) -> None:
    assert len(list(parsed(predicted._repr_html_()).iter("rect"))) == len(predicted.spans)
    many = replace(predicted, spans=predicted.spans * 400)
    assert re.search(r"the first 20,000 of 44,800 cells", many._repr_html_())
    assert parsed(Timeline(2, ())._repr_html_()) is not None


def test_a_program_folds_its_text_away(schedule: Schedule) -> None:
    program = lower(schedule)
    root = parsed(program._repr_html_())
    assert root.find("details/summary") is not None
    assert root.find("details/pre").text == "\n".join(str(program).splitlines())


def test_a_plan_shows_its_table(plan) -> None:
    root = parsed(plan._repr_html_())
    assert len(list(root.iter("tr"))) == 1 + 4 + 1
    assert "layer3.0.conv1" in plan._repr_html_()
