"""One number for one thing: all tables and pictures of a plan agree about the step, the bubble and the peak of activations."""

from __future__ import annotations

import html
import json
import re

import pytest
import torch
from pages import opened
from torch import nn

import pipecompile as pc
from pipecompile.cli.command_report import simulate_report
from pipecompile.show.table import render

ACT = """
const cells = (row) => [...row.cells].map((cell) => cell.textContent);
const told = { facts: {}, rows: [...document.querySelectorAll("#what-if tbody tr")].map(cells) };
for (const pair of document.querySelectorAll("#facts div")) told.facts[pair.children[0].textContent] = pair.children[1].textContent;
told.heads = [...document.querySelectorAll("#what-if thead th")].map((cell) => cell.textContent);
told.memory = [...document.querySelectorAll("#memory tbody tr")].map(cells);
told.kinds = [...document.querySelectorAll("#memory thead th")].map((cell) => cell.textContent);
told.titles = [...document.querySelectorAll("h3")].map((title) => title.textContent);
told.pictures = [...document.querySelectorAll("#timelines svg")].map((svg) => svg.getAttribute("aria-label"));
document.body.dataset.told = JSON.stringify(told);
"""
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "%": 0.01}


def numbers(text):
    """Return the numbers with a unit in a text, in seconds, bytes or as a share."""
    found = re.findall(r"([\d.]+)\s?(ms|µs|ns|KiB|MiB|s|B|%)(?![\w])", text)
    return [float(number) * UNITS[unit] for number, unit in found]


def options(name):
    return {"zb-h1": {"schedule": "zb-h1"}, "checkpoint": {"checkpoint": "always"}}.get(name, {})


@pytest.fixture(scope="module", params=["1f1b", "zb-h1", "checkpoint"])
def pipe(request):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
    return pc.compile(
        nn.Sequential(*layers), 4, devices=["cpu"] * 4, example_args=(torch.randn(64, 64),), n_microbatches=8,
        cost="analytic", loss_fn=nn.functional.mse_loss, memory_limit=1e9, **options(request.param),
    )  # fmt: skip


@pytest.fixture(scope="module")
def told(pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    page = opened(pipe.report(folder / "report.html").read_text(), folder, ACT)
    return json.loads(html.unescape(re.search(r'data-told="([^"]*)"', page)[1]))


def own_row(pipe, told):
    row = next(row for row in told["rows"] if row[0] == pipe.schedule.name)
    return dict(zip(told["heads"], row, strict=True))


def test_the_peak_of_activations(pipe, told):
    peak = max(pipe.simulate().peak_memory)
    column = next(i for i, kind in enumerate(told["kinds"]) if kind.startswith("activations"))
    unit = UNITS[told["kinds"][column].split("\n")[1]]
    table = max(float(row[column]) * unit for row in told["memory"])
    shown = [
        *numbers(told["facts"]["peak activations, predicted"]), *numbers(own_row(pipe, told)["peak activations"]), table,
    ]  # fmt: skip
    command = simulate_report(pipe, pc.simulate(pipe.schedule), None)
    lines = [line for line in render(command.blocks[1]).splitlines() if "cpu" in line]
    shown.append(max(size for line in lines for size in numbers(line) if size > 1))
    assert len(shown) == 4
    assert shown == pytest.approx([peak] * 4, rel=0.01)


def test_the_step_and_the_bubble(pipe, told):
    predicted, row = pipe.simulate(), own_row(pipe, told)
    summary = simulate_report(pipe, pc.simulate(pipe.schedule), None).blocks[0]
    step, bubble = (re.search(rf"{name} ([^,\n]*)", summary)[1] for name in ("makespan", "bubble"))
    steps = [told["facts"]["step, predicted"], row["step"], told["titles"][0].split(",")[0], step]
    bubbles = [told["facts"]["bubble, predicted"], row["bubble"], told["titles"][0].split(",")[1], bubble]
    bubbles.append(re.search(r"bubble ([\d.]+%)", str(pipe))[1])
    assert [numbers(text)[0] for text in steps] == pytest.approx([predicted.makespan] * 4, rel=0.01)
    assert [numbers(text)[0] for text in bubbles] == pytest.approx([predicted.bubble] * 5, abs=0.001)
    assert row["per sample"].startswith("1.000 ")


def test_the_picture_says_the_same_in_words(pipe, told):
    assert numbers(told["pictures"][0])[0] == pytest.approx(pipe.simulate().makespan, rel=0.01)


def test_small_amounts_are_not_zero_beside_a_large_limit(told):
    sums = [
        row[told["kinds"].index(kind)] for row in told["memory"] for kind in told["kinds"] if kind.startswith("all")
    ]
    assert all(float(size) > 0 for size in sums)
