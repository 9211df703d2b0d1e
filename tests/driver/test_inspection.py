"""Inspection: costs, dump and report of a compiled pipeline, from data alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipecompile.costs.device_specs import Links
from pipecompile.driver.inspection import Inspection
from pipecompile.driver.programs import step_executable, step_schedule
from pipecompile.errors import InputError
from tests.support.compilations import specialized


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    compiled = specialized(loss_fn=torch.Tensor.mean)
    return Inspection(
        title="<Net>",
        plan=compiled.plan,
        problem=None,
        graph=compiled.graph,
        schedule=step_schedule(compiled, 3),
        program=step_executable(compiled, 3, with_target=False).program,
        measured=None,
        links=Links(1e-9, 1e-6),
        is_overlapped=False,
        is_written=False,
        phases="record 1 ms\n",
    )


def test_costs_are_those_of_the_plan(inspection: Inspection) -> None:
    costs = inspection.costs
    assert costs["forward"] == [stage.forward for stage in inspection.plan.stages]
    assert costs["backward"] == [stage.backward for stage in inspection.plan.stages]
    (sent,) = [route for route in inspection.plan.routes if route.source == 0]
    assert costs["transfer"][sent.value] == pytest.approx(1e-6 + sent.nbytes * 1e-9)


def test_the_simulation_runs_the_whole_program(inspection: Inspection) -> None:
    timeline = inspection.simulate()
    assert sorted(span.name for span in timeline.compute(0)) == ["0B0", "0B1", "0B2", "0F0", "0F1", "0F2"]
    slower = replace(inspection, links=Links(1e-9, 1.0)).simulate()
    assert slower.makespan > timeline.makespan + 1


def test_a_dump_has_every_level(inspection: Inspection, tmp_path: Path) -> None:
    paths = inspection.dump(tmp_path / "levels")
    texts = {path.name: path.read_text() for path in paths}
    assert {"plan.json", "schedule.csv", "program.txt", "passes.txt", "phases.txt", "timeline.json", "graph.txt", "graph.py",
            "graph.dot", "report.html"} <= set(texts)  # fmt: skip
    assert texts["phases.txt"] == inspection.phases
    assert texts["schedule.csv"] == inspection.schedule.to_csv()
    assert texts["plan.json"].strip() == inspection.plan.to_json()
    assert texts["program.txt"].strip() == str(inspection.program).strip()
    assert texts["passes.txt"].strip()


def test_a_report_is_one_page_with_an_escaped_title(inspection: Inspection, tmp_path: Path) -> None:
    path = inspection.write_report(str(tmp_path / "page.html"))
    assert path == tmp_path / "page.html"
    text = path.read_text()
    assert text == inspection.report()
    assert "\\u003cNet>" in text
    assert "<Net>" not in text


def test_the_samples_per_second_need_the_rows_of_all_devices(inspection: Inspection) -> None:
    measured = inspection.simulate()
    own = replace(measured, spans=tuple(measured.compute(0)))
    assert "samples per second" in replace(inspection, measured=measured, samples=6).report()
    assert "samples per second" not in replace(inspection, measured=own, samples=6).report()


def test_a_drawing_is_returned_and_written(inspection: Inspection, tmp_path: Path) -> None:
    picture = inspection.draw(tmp_path / "stages.svg")
    assert (tmp_path / "stages.svg").read_text(encoding="utf-8") == str(picture) == str(inspection.draw())
    assert inspection.draw(tmp_path / "missing" / "stages.svg") == picture
    with pytest.raises(InputError, match="is a directory, not a file"):
        inspection.draw(tmp_path)
    with pytest.raises(InputError, match=r"(?s)the picture is SVG.*stages\.svg"):
        inspection.draw(tmp_path / "stages.png")
