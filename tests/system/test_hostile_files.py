"""Hostile files and names: nothing of them is executed, every error is ours, and each takes less than a second.

Per reader, whole texts that are no file of its kind, and a file of its kind with each of the hostile values at each kind of place.
"""

from __future__ import annotations

import builtins
import json
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.interchange.order_reader import read_order
from pipecompile.ir.program_text import parse_program
from pipecompile.partitioners.problem import Node, Problem, Tensor
from pipecompile.show.table import StageTable, render
from pipecompile.tracing import trace
from pipecompile.tracing.graph_parser import parse_graph
from tests.support.cpu_time import assert_within

pytestmark = pytest.mark.smoke

LIMIT = 1.0
"""Seconds of CPU time that a hostile file may take."""

RAN = "pipecompile_test_hostile_ran"
CODE = f"__import__('builtins').__setattr__('{RAN}', 1)"

TEXTS = {
    "nothing": "",
    "NUL": "\0" * 100,
    "controls": "".join(map(chr, range(32))) + "\x7f\x9b\u202e\u2028",
    "lone surrogate": "\udc80\ud800",
    "brackets": "[" * 200_000,
    "parentheses": "(" * 200_000,
    "nested objects": '{"a":' * 100_000,
    "signs": "-" * 200_000 + "1",
    "one long line": "0F0," * 50_000,
    "number of 100,000 digits": "9" * 100_000,
    "pickle": pickle.dumps(Exception).decode("latin-1"),
    "archive": "PK\3\4" + "\0" * 64,
    "code": CODE,
    "code in a string": f'f"{{{CODE}}}"',
    "template": "${PATH} {0.__class__} %n%n%n",
    "markup": "<!DOCTYPE x [<!ENTITY a 'b'>]><script>&a;</script>",
}

NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1",
    "-1e308",
    "9" * 30,
    "9" * 5000,
    "1e308",
    "null",
    "true",
    "[[]]",
)

NAMES = (
    "../../../etc/passwd", "/dev/zero", "a\0b", "\x1b[2J", "\u202eabc", "$HOME $(id)", "'; " + CODE + "; '", "a" * 100_000,
    "__class__", "<script>alert(1)</script>", "NaN", "0", "", "{x}", "\n\n", "%s%n",
)  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


@cache
def pipe() -> pc.Pipeline:
    return pc.compile(Net(), 2, example_args=(torch.ones(4, 4),), n_microbatches=2, cost="analytic", devices=["cpu"] * 2,
                      loss_fn=lambda y: y.square().mean())  # fmt: skip


def _plan(text: str) -> object:
    plan = pc.Plan.from_json(text)
    return render(StageTable(plan, None)), str(plan)


def _compiled(text: str) -> object:
    plan = pc.Plan.from_json(text)
    return pc.compile(Net(), 2, example_args=(torch.ones(4, 4),), plan=plan, cost="analytic", devices=["cpu"] * 2)


def _problem(text: str) -> object:
    return pc.partition(pc.Problem.from_json(text), 2)


def _schedule(text: str) -> object:
    schedule = pc.Schedule.from_csv(text)
    pc.verify(schedule)
    return pc.simulate(schedule)


def _program(text: str) -> object:
    program = parse_program(text)
    pc.verify(program)
    return program


def _order(text: str) -> object:
    return str(pc.check_order(read_order(text, "hostile")))


READERS: dict[str, Callable[[str], object]] = {
    "plan": _plan,
    "problem": _problem,
    "schedule": _schedule,
    "program": _program,
    "order": _order,
    "graph": parse_graph,
}


@cache
def sound(kind: str) -> str:
    """Return a sound file of a kind."""
    match kind:
        case "plan":
            return pipe().plan.to_json()
        case "problem":
            nodes = tuple(Node(name, 1.0, 2.0, 10.0) for name in "abc")
            return Problem(nodes, (("a", "b"), ("b", "c")), (Tensor("a", ("b",), 5.0),), memory_limit=100.0).to_json()
        case "schedule":
            return pc.build_schedule("1f1b", 2, 4).to_csv()
        case "program":
            return str(pipe().program)
        case "order":
            return "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
        case _:
            return str(trace(Net(), torch.ones(4, 4)))


def answered(read: Callable[[str], object], text: str) -> str:
    """Return the error that a reader raises, "" if it takes the text. Fail if the error is not ours, late or without words."""
    said: list[str] = []
    assert_within(LIMIT, lambda: said.append(_error(read, text)))
    said[0].encode()  # raises of a lone surrogate
    assert len(said[0]) < 20_000
    assert not hasattr(builtins, RAN)
    return said[0]


def _error(read: Callable[[str], object], text: str) -> str:
    try:
        read(text)
    except pc.PipecompileError as error:
        return str(error)
    return ""


def test_sound_files_are_taken() -> None:
    assert {kind: answered(read, sound(kind)) for kind, read in READERS.items()} == dict.fromkeys(READERS, "")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", READERS)
def test_a_text_that_is_no_file_of_its_kind_is_refused(kind: str, text: str) -> None:
    said = answered(READERS[kind], TEXTS[text])
    assert said or (kind, text) == ("order", "one long line")  # an order that `check_order` finds faults in


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12])
@pytest.mark.parametrize("kind", READERS)
def test_hostile_numbers(kind: str, number: str) -> None:
    """At the first place of each kind: JSON by its keys, lines by their words."""
    texts = list(at_places(kind, r"-?\d[\d.]*", number))
    assert texts
    errors = [answered(READERS[kind], text) for text in texts]
    assert any(errors) or number in ("true", "null", "1e308")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:12]))
@pytest.mark.parametrize("kind", READERS)
def test_hostile_names(kind: str, name: str) -> None:
    written = json.dumps(name)[1:-1] if sound(kind).startswith("{") else name
    pattern = r'(?<=")[^"]+(?="[^:]*$)' if sound(kind).startswith("{") else r"[A-Za-z_]\w*"
    for text in at_places(kind, pattern, written):
        answered(READERS[kind], text)


@pytest.mark.parametrize("number", ["NaN", "-1"])
def test_a_plan_with_hostile_numbers_is_compiled_or_refused(number: str) -> None:
    for text in at_places("plan", r"-?\d[\d.]*", number):
        answered(_compiled, text)


def at_places(kind: str, pattern: str, replacement: str) -> Iterator[str]:
    """Yield the sound file with a replacement at the first match of each line, lines of one form once."""
    lines, forms = sound(kind).splitlines(), set[str]()
    for index, line in enumerate(lines):
        form = re.sub(r"[\d.]+", "0", line.strip())
        if form not in forms and (match := re.search(pattern, line)):
            forms.add(form)
            changed = line[: match.start()] + replacement + line[match.end() :]
            yield "\n".join([*lines[:index], changed, *lines[index + 1 :]]) + "\n"


def test_a_model_with_hostile_names_runs_and_is_shown(tmp_path: Path) -> None:
    names = [name for name in (*NAMES, "\udc80") if name and "." not in name and not hasattr(nn.Module, name)]
    assert len(names) > 10
    model = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names))
    x = torch.ones(4, 4)
    piped = pc.compile(model, 2, example_args=(x,), cost="analytic", devices=["cpu"] * 2)
    torch.testing.assert_close(piped(x), model(x))
    piped.dump(tmp_path / "dump")
    assert "<script>alert" not in piped.report(tmp_path / "report.html").read_text()
    assert "\x1b[2J" not in str(piped)
    assert not hasattr(builtins, RAN)
