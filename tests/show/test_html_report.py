"""The one page: what is in it, that its scripts simulate as we do, and that a browser shows it."""

from __future__ import annotations

import json
import re
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from pages import data_of, opened, run_script, scripts
from torch import nn

import pipecompile as pc
from pipecompile.planning.alternatives import unit_what_if
from pipecompile.schedules import build_schedule
from pipecompile.show import report_html
from pipecompile.show.html_report import ReportSetting
from pipecompile.simulation.simulator import simulate

ACT = """
const rects = () => document.querySelectorAll("#timelines rect.cell").length;
const told = { cells: rects() };
const first = document.querySelector("#timelines svg"), box = first.getBoundingClientRect();
const at = { clientX: box.left + 90, clientY: box.top + 8, bubbles: true };
first.dispatchEvent(new PointerEvent("pointermove", at));
told.hint = document.getElementById("hint").textContent;
told.dim = document.querySelectorAll("rect.dim").length;
first.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: -1500 }));
told.scrolled = rects();
first.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: -1500, ctrlKey: true }));
told.zoomed = rects();
first.dispatchEvent(new MouseEvent("dblclick", at));
told.all = rects();
for (let i = 0; i < 9; i++) first.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
told.keys = rects();
first.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
const ends = () => [...document.querySelectorAll("#timelines svg")].map((svg) => [...svg.querySelectorAll("text.soft")].filter((text) => / .?s$/.test(text.textContent)).at(-1).textContent);
told.own = ends();
document.querySelector("#timelines [name=scale]").click();
told.common = ends();
told.names = [...document.querySelectorAll("#cut svg text")].map((text) => text.textContent);
const form = document.querySelector("#what-if form"), rows = () => [...document.querySelectorAll("#what-if tbody tr")];
told.rows = rows().map((row) => row.innerText.split("\\t")[0]);
form.querySelector("[name=devices]").value = "2";
form.dispatchEvent(new Event("input"));
told.fewer = document.querySelector("#what-if svg").querySelectorAll("text").length;
rows().at(-1).click();
told.chosen = document.querySelector("#what-if h3").textContent;
told.last = rows().at(-1).innerText.split("\\t")[0];
told.line = document.querySelector("#what-if pre").textContent;
told.arcs = document.querySelectorAll("#cut path.route").length;
told.skips = document.querySelectorAll("#cut path.skip").length;
told.pictures = [...document.querySelectorAll("svg")].map((svg) => svg.getAttribute("aria-label"));
told.again = document.querySelector("#environment pre").textContent;
told.wide = document.documentElement.scrollWidth <= innerWidth;
told.legend = document.querySelector("#timelines .legend").innerText;
told.compared = [...document.querySelectorAll("#compared tbody tr")].map((row) => row.cells.length);
document.body.dataset.told = JSON.stringify(told);
"""


class Skipping(nn.Module):
    """A value that passes over a stage, and a name that wants to be a tag."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return x + first


@pytest.fixture(scope="module")
def pipe():
    torch.manual_seed(0)
    pipe = pc.compile(
        Skipping(), 4, devices=["cpu"] * 4, example_args=(torch.randn(8, 8),), n_microbatches=4, cost="analytic",
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
    return pipe


@pytest.fixture(scope="module")
def page(pipe, tmp_path_factory):
    return pipe.report(tmp_path_factory.mktemp("report") / "report.html").read_text()


def test_the_page_asks_for_nothing_else(page):
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(""", page)
    assert set(re.findall(r"https?://[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}
    assert len(page) < 1e6


def test_it_has_what_was_planned_predicted_and_measured(pipe, page):
    data = data_of(page)
    assert data["title"] == "Skipping · 1f1b, 4 stages on 4 devices, 4 micro-batches"
    assert [t["name"] for t in data["timelines"]] == ["predicted", "measured"]
    assert [len(row) for row in data["timelines"][0]["rows"]] == [8] * 4
    assert data["timelines"][0]["makespan"] == pipe.simulate().makespan
    cells = {f"{stage}{kind}{mb}" for stage, kind, mb, *_ in data["timelines"][1]["rows"][2]}
    assert cells == {str(action) for action in pipe.schedule.rows[2]}
    assert any(cell[5] for row in data["timelines"][0]["rows"] for cell in row), "nothing is critical"
    assert [column["name"] for column in data["table"]["columns"]][:3] == ["stage", "device", "modules"]
    assert len(data["advice"]) == len(pc.advise(pipe.program, forward=1.0))


def test_predicted_and_measured_seconds_of_each_stage(pipe, page):
    compared = data_of(page)["compared"]
    columns = {column["name"]: column for column in compared["columns"]}
    assert columns["stage"]["cells"] == ["0", "1", "2", "3"]
    kinds = {name.split("\n")[0] for name in columns}
    assert kinds == {"stage", "forward", "backward", "all"}
    assert compared["remarks"][0].startswith("The step took ")
    assert data_of(report_html(pipe.schedule, pipe.simulate()))["compared"] is None


def test_memory_is_by_kind_and_device(pipe, page):
    memory = data_of(page)["memory"]
    columns = {column["name"].split("\n")[0]: column for column in memory["columns"]}
    assert list(columns) == ["device", "parameters", "gradients", "optimizer", "buffers", "activations", "all"]
    assert all(len(column["cells"]) == 4 for column in columns.values())
    assert memory["remarks"][-1].startswith("No state of an optimizer")
    assert data_of(report_html(pipe.schedule, pipe.simulate()))["memory"] is None


def test_the_facts_have_samples_per_second_and_the_environment(pipe, page):
    facts, environment = dict(data_of(page)["facts"]), data_of(page)["environment"]
    assert dict(environment["facts"])["torch"] == torch.__version__
    assert data_of(report_html(pipe.schedule, pipe.simulate()))["environment"] is None
    assert facts["samples per second, measured"] == f"{8 / pipe.measured.makespan:.4g} (8 in a step)"
    assert "samples per second, measured" not in dict(data_of(report_html(pipe.schedule, pipe.simulate()))["facts"])


@pytest.mark.filterwarnings("ignore")
def test_the_lines_of_the_environment_make_the_report_again(pipe, page, tmp_path, monkeypatch):
    again = (
        data_of(page)["environment"]["again"].replace("example_args=..., ", "").replace("loss_fn=...", "loss_fn=loss")
    )
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    names = {"pc": pc, "pipe": pipe, "model": Skipping(), "loss": nn.functional.mse_loss, "x": x, "y": x}
    exec(again, names)
    data, expected = data_of((tmp_path / "report.html").read_text()), data_of(page)
    for key in ("title", "cut", "devices"):
        assert data[key] == expected[key], key
    assert data["timelines"][0]["rows"] == expected["timelines"][0]["rows"]


def test_the_cut_has_all_nodes_in_the_order_of_stages_and_the_skip(pipe, page):
    cut = data_of(page)["cut"]
    assert [stage for *_, stage in cut["nodes"]] == sorted(pipe.plan.stage_of.values())
    assert {name for name, *_ in cut["nodes"]} == {name.replace("layers_", "layers.") for name in pipe.plan.stage_of}
    skips = [(r["value"], stage) for r in cut["routes"] for _, stage, is_skip in r["ends"] if is_skip]
    assert skips == [(route.value, end) for route in pipe.plan.routes for end in route.skips if end >= 0]
    assert skips


def test_text_of_the_user_cannot_end_the_data(schedule, predicted, tmp_path):
    page = report_html(schedule, predicted, setting=ReportSetting("<!--<script></script><b>"))
    assert data_of(page)["title"].startswith("<!--<script></script><b> · ")
    assert "&lt;!--&lt;script&gt;&lt;/script&gt;&lt;b&gt; · 1f1b</h1>" in opened(page, tmp_path).replace(
        "1f1b, 4 stages on 4 devices, 8 micro-batches</h1>", "1f1b</h1>"
    )


@pytest.mark.filterwarnings("ignore")
def test_the_line_of_an_order_makes_its_schedule(pipe, page):
    """Every fifth order of the report: compiled on devices of the type of the report, and built without a model."""
    given = data_of(page)["whatIf"]
    orders = [order for order in given["orders"][1::5] if order["devices"] <= 4]
    calls = f"{json.dumps(orders)}.map((o) => [lineOf(o, '{given['type']}'), lineOf(o, ''), lineOf(o, 'cuda')])"
    source = (scripts() / "what_if.js").read_text()
    lines = run_script(f"{source}\nconsole.log(JSON.stringify({calls}));")
    assert len(lines) > 5
    for order, (compiled, built, on_gpus) in zip(orders, lines, strict=True):
        assert eval(built, {"pc": pc}).to_csv() == order["csv"]
        assert f'devices=[f"cuda:{{i}}" for i in range({order["devices"]})]' in on_gpus
        seen = {"pc": SimpleNamespace(compile=lambda *args, **options: (args, options)), "model": pipe.model}
        (_, n_stages), options = eval(compiled, seen)
        assert n_stages == len(order["placement"])
        assert options["devices"] == ["cpu"] * order["devices"]
        assert (options["schedule"], options["n_microbatches"]) == (order["name"], order["microbatches"])
        assert options.keys() <= signature(pc.compile).parameters.keys()


def test_a_browser_shows_it_and_answers(page, tmp_path):
    told = json.loads(re.search(r'data-told="([^"]*)"', opened(page, tmp_path, ACT))[1].replace("&quot;", '"'))
    assert told["cells"] == told["all"] == 2 * 4 * 8
    assert told["scrolled"] == told["cells"], "the wheel alone scrolls the page"
    assert 0 < told["zoomed"] < told["cells"]
    assert 0 < told["keys"] < told["cells"]
    assert len(set(told["own"])) == 2
    assert len(set(told["common"])) == 1
    assert {"layers.0", "layers.5"} <= set(told["names"])
    assert told["hint"].startswith("0F0: forward of stage 0, micro-batch 0\n0 to ")
    assert told["dim"] == 4 * 8 - 4 * 2, "all but the two cells of micro-batch 0 on each device"
    assert {"1f1b", "gpipe", "zbv", "dualpipev"} <= set(told["rows"])
    assert told["chosen"].startswith(f"{told['last']}: ")
    assert f'schedule="{told["last"]}"' in told["line"]
    assert told["compared"] == [10] * 4
    assert told["wide"]
    assert [label.split(":")[0] for label in told["pictures"]] == [
        "Timeline, predicted", "Timeline, measured", "The cut", f"Timeline, {told['last']}",
    ]  # fmt: skip
    assert "memory of 3 · cpu" in told["legend"]
    assert "on the critical path" in told["legend"]
    assert told["again"].endswith('pipe.report("report.html")')
    assert told["skips"] >= 1
    assert told["arcs"] > told["skips"]


def test_a_schedule_alone_has_a_page_too(tmp_path):
    schedule = build_schedule("zbv", 8, 8)
    page = report_html(schedule, simulate(schedule), what_if=unit_what_if(schedule), seconds=False)
    data = data_of(page)
    assert data["table"] is None
    assert data["whatIf"]["own"] == {"schedule": "zbv", "devices": 4, "microbatches": 8}
    assert 'id="what-if"' in page
    assert "rect" in opened(page, tmp_path)
