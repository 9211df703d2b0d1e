"""The dump: which files there are, and that a failure leaves no half of one."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from torch import fx, nn

from pipecompile.errors import InputError
from pipecompile.ir import Schedule
from pipecompile.ir.plan import Plan
from pipecompile.show.dump import dump
from pipecompile.tracing.node_facts import note


@pytest.fixture
def graph():
    made = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    for node in made.graph.nodes:
        note(node, module="")
    return made


@pytest.fixture
def pieces(plan, graph, schedule, program, predicted):
    stages = tuple(replace(s, nodes=int(s.stage < 2), sent_bytes=0.0, skips_in=0, skips_out=0) for s in plan.stages)
    return {
        "plan": replace(plan, stage_of={"_0": 0, "_1": 1}, stages=stages, routes=()),
        "graph": graph,
        "schedule": schedule,
        "program": program,
        "predicted": predicted,
    }


@pytest.fixture
def no_dot(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)


@pytest.mark.usefixtures("no_dot")
def test_every_piece_becomes_a_file_that_reads_back(tmp_path, pieces):
    paths = dump(tmp_path / "new" / "folder", **pieces)
    names = ["graph.dot", "graph.py", "plan.json", "program.txt", "schedule.csv", "timeline.json", "timeline.svg"]
    assert [path.name for path in paths] == names
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == names
    assert Plan.load(paths[2]) == pieces["plan"]
    assert Schedule.from_csv(paths[4].read_text()) == pieces["schedule"]
    assert paths[3].read_text().rstrip("\n") == str(pieces["program"]).rstrip("\n")
    assert "class" in paths[1].read_text()
    assert "1f1b, 4 stages, 8 micro-batches" in paths[6].read_text(encoding="utf-8")


def test_missing_pieces_are_left_out_and_old_files_replaced(tmp_path, schedule):
    (tmp_path / "schedule.csv").write_text("old")
    assert dump(str(tmp_path), schedule=schedule) == [tmp_path / "schedule.csv"]
    assert (tmp_path / "schedule.csv").read_text() == schedule.to_csv()
    assert os.listdir(tmp_path) == ["schedule.csv"]


@pytest.mark.usefixtures("no_dot")
def test_a_failed_write_leaves_what_was_there(tmp_path, pieces, monkeypatch):
    dump(tmp_path, **pieces)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(self, text, encoding):
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match="No space left on device"):
        dump(tmp_path, **pieces | {"schedule": replace(pieces["schedule"], rows=())})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nothing_is_written_when_a_text_cannot_be_made(tmp_path, pieces, monkeypatch):
    monkeypatch.setattr(Plan, "to_json", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dump(tmp_path / "out", **pieces)
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_is_an_input_error(tmp_path, schedule):
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="is a file, not a directory"):
        dump(tmp_path / "taken", schedule=schedule)


def test_without_matplotlib_the_svg_is_left_out_with_a_word(tmp_path, predicted, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "pipecompile.show"):
        assert [path.name for path in dump(tmp_path, predicted=predicted)] == ["timeline.json"]
    assert "pip install matplotlib" in caplog.text


@pytest.mark.parametrize(("script", "has_svg"), [("cat > /dev/null; echo '<svg/>'", True), ("exit 3", False)])
def test_dot_draws_the_graph_when_it_works(tmp_path, pieces, monkeypatch, script, has_svg):
    tool = tmp_path / "dot"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(tool))
    paths = dump(tmp_path / "out", plan=pieces["plan"], graph=pieces["graph"])
    assert ("graph.svg" in [path.name for path in paths]) == has_svg
    assert (tmp_path / "out" / "graph.dot").exists()
