"""Dump of a compilation: plan, schedule, program, timelines and graph as files in one directory."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pipecompile.errors import InputError
from pipecompile.ir import Program, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.slices import count_text
from pipecompile.ir.timeline import Timeline
from pipecompile.ir.views import register_writer
from pipecompile.show.gantt import timeline_svg
from pipecompile.show.graphviz import graph_dot
from pipecompile.show.perfetto import timeline_trace
from pipecompile.text.input_checks import file_path
from pipecompile.text.text_file import cause_of
from pipecompile.text.units import counted

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["dump", "write_text"]

_log = logging.getLogger("pipecompile.show")
_DOT_SECONDS = 60.0
"""Time limit of Graphviz, in seconds."""


def dump(
    directory: str | Path,
    *,
    plan: Plan | None = None,
    graph: GraphModule | None = None,
    schedule: Schedule | None = None,
    program: Program | None = None,
    predicted: Timeline | None = None,
    measured: Timeline | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
    seconds: bool = True,
) -> list[Path]:
    """Write the files of all arguments that are not None, and `texts`, by the name of the file. Return the paths.

    plan.json, schedule.csv, program.txt, timeline.json, timeline.svg (with matplotlib), graph.txt (of a traced graph), graph.py,
    graph.dot, and graph.svg if Graphviz' `dot` is installed. All texts are computed before the first file is written, and a file
    appears whole or not at all. `seconds` False: times are in the unit of the costs. Raise InputError if the directory cannot be
    written.
    """
    folder, written = file_path("directory", directory), dict(texts)
    written |= {} if graph is None else _graph_texts(graph, plan)
    if predicted is not None:
        devices = () if plan is None else plan.devices
        written |= _timeline_texts(predicted, measured, program, schedule, devices, seconds)
    written |= {} if plan is None else {"plan.json": plan.to_json() + "\n"}
    written |= {} if schedule is None else {"schedule.csv": schedule.to_csv()}
    written |= {} if program is None else {"program.txt": str(program).rstrip("\n") + "\n"}
    try:
        if folder.is_file():
            hint = f"directory={str(folder.with_suffix('') / 'dump')!r}"
            raise InputError(f"{str(folder)!r} is a file, not a directory", hint=hint)
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / name, written[name]) for name in sorted(written)]
    except OSError as error:
        raise _unwritable("the dump", folder, error) from error


def write_text(path: Path, text: str) -> Path:
    """Write one file, whole or not at all. Raise InputError if the file cannot be written."""
    try:
        if path.is_dir():
            raise InputError(f"{str(path)!r} is a directory, not a file", hint=f"path={str(path / 'report.html')!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write(path, text)
    except OSError as error:
        raise _unwritable(path.name, path.parent, error) from error


def _unwritable(what: str, folder: Path, error: OSError) -> InputError:
    hint = "pass a directory with write permission"
    return InputError(f"{what} cannot be written", where=str(folder), why=cause_of(error), hint=hint)


def _timeline_texts(
    predicted: Timeline,
    measured: Timeline | None,
    program: Program | None,
    schedule: Schedule | None,
    devices: tuple[str, ...],
    seconds: bool,
) -> dict[str, str]:
    texts = {"timeline.json": timeline_trace(predicted, measured, program=program, devices=devices)}
    if importlib.util.find_spec("matplotlib") is None:
        _log.warning("timeline.svg is left out: matplotlib is not installed (pip install matplotlib)")
        return texts
    title = ""
    if schedule is not None:
        title = f"{schedule.name}, {counted(schedule.n_stages, 'stage')}, {count_text(schedule)}"
    return texts | {"timeline.svg": timeline_svg(predicted, measured, title=title, devices=devices, seconds=seconds)}


def _graph_texts(graph: GraphModule, plan: Plan | None) -> dict[str, str]:
    texts = {"graph.py": graph.print_readable(print_output=False).rstrip("\n") + "\n"}
    from pipecompile.tracing.traced_graph import TracedGraph  # imports torch

    texts |= {"graph.txt": str(graph)} if isinstance(graph, TracedGraph) else {}
    if plan is None:
        return texts
    texts["graph.dot"] = graph_dot(graph, plan)
    return texts | _svg_texts(texts["graph.dot"])


def _svg_texts(dot: str) -> dict[str, str]:
    """Return graph.svg as Graphviz draws it, or nothing if Graphviz is missing or fails: the other files do not
    depend on it.
    """
    program = shutil.which("dot")
    if program is None:
        return {}
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=dot, capture_output=True, text=True, timeout=_DOT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("graph.svg is left out: %s", error)
        return {}
    return {"graph.svg": done.stdout}


def _write(path: Path, text: str) -> Path:
    """Write to a temporary file beside the target, then rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


register_writer("file", write_text)
