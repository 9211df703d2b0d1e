"""Mistakes that people make, and what they are told: what, where, why and what to try, before anything has changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

pytestmark = pytest.mark.smoke


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.b(self.a(x).relu())
        return self.c(x if y is None else x + y)


class Branching(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.c(self.b(self.a(x) + 1 if x.sum() > 0 else self.a(x)))


X = torch.randn(8, 8)


def build(model: nn.Module | None = None, n_stages: Any = 2, **options: Any) -> pc.Pipeline:
    given = {"example_args": (X,), "cost": "analytic", "loss_fn": F.cross_entropy} | options
    return pc.compile(Net() if model is None else model, n_stages, **given)


def told(error: type[pc.PipecompileError], action: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("n_stages", [0, -3, 1.5, True, "two"])
def test_number_of_stages(n_stages: Any) -> None:
    text = told(pc.InputError, lambda: build(n_stages=n_stages))
    assert f"n_stages={n_stages!r} is not a whole number of at least 1" in text


def test_more_stages_than_the_graph_can_bear() -> None:
    text = told(pc.PartitionError, lambda: build(n_stages=9))
    assert "cannot be cut into 9 stages" in text
    assert "4 pieces" in text
    assert "n_stages=4 or fewer" in text


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["cpu", "cuda:99"], "there is no device cuda:99 here"),
        (["cpu", "gpu"], "'gpu' is not a device"),
        ("cpu", "is not a list of devices"),
        ([], "is not a list of devices"),
    ],
)
def test_devices_that_do_not_exist(devices: Any, words: str) -> None:
    assert words in told(pc.InputError, lambda: build(devices=devices))


def test_devices_that_do_not_fit_the_stages() -> None:
    text = told(pc.ScheduleError, lambda: build(n_stages=4, devices=["cpu", "cpu"]))
    assert "devices= with 4 entries" in text


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("partitioner", "magic", "'dp'"),
        ("cost", "guess", "'analytic'"),
        ("dispatch", "fibers", "'inline'"),
        ("loss_reduction", "max", "'mean'"),
    ],
)
def test_unknown_choices_list_the_known(option: str, value: str, known: str) -> None:
    text = told(pc.InputError, lambda: build(**{option: value}))
    assert value in text
    assert known in text


def test_unknown_schedule_lists_the_known() -> None:
    text = told(pc.ScheduleError, lambda: build(schedule="2f2b"))
    assert "'2f2b'" in text
    assert "gpipe" in text
    assert "1f1b" in text


@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_number_of_micro_batches(count: Any) -> None:
    assert f"n_microbatches={count!r} is not a whole number" in told(pc.InputError, lambda: build(n_microbatches=count))


def test_not_a_module() -> None:
    assert "not an nn.Module" in told(pc.InputError, lambda: pc.compile(lambda x: x, 2))  # type: ignore[arg-type]


def test_loss_fn_is_not_a_function() -> None:
    assert "loss_fn='cross_entropy' is not a function" in told(pc.InputError, lambda: build(loss_fn="cross_entropy"))


def test_wrong_shape_names_the_users_line() -> None:
    text = told(pc.TraceError, lambda: build(example_args=(torch.randn(8, 5),)))
    assert "test_mistakes.py" in text
    assert "self.a(x)" in text
    pipe = build()
    assert "self.a(x)" in told(pc.TraceError, lambda: pipe(torch.randn(8, 5)))
    assert pipe(X).shape == (8, 4)


def test_wrong_arguments() -> None:
    text = told(pc.TraceError, lambda: build()(X, nonsense=X))
    assert "nonsense" in text


def test_empty_batch() -> None:
    pipe = build()
    assert "the batch is empty" in told(pc.InputError, lambda: pipe(X[:0]))
    assert "x: 0 samples" in told(pc.InputError, lambda: pipe.step(X[:0], target=X[:0]))


def test_batch_sizes_that_disagree() -> None:
    text = told(pc.InputError, lambda: build()(X, y=X[:5]))
    assert "x: 8, y: 5" in text


def test_an_array_that_is_not_a_tensor() -> None:
    text = told(pc.InputError, lambda: build()(X, y=X.numpy()))
    assert "numpy.ndarray" in text
    assert "torch.from_numpy" in text


def test_target_of_another_size() -> None:
    text = told(pc.InputError, lambda: build().step(X, target=torch.zeros(5, dtype=torch.long)))
    assert "target: 5, inputs: 8" in text


def test_a_target_that_the_loss_needs() -> None:
    assert "step(x, target=...)" in told(pc.InputError, lambda: build().step(X))


def test_checkpoint_that_is_none() -> None:
    assert "'except_last'" in told(pc.ScheduleError, lambda: build(checkpoint="sometimes"))
    assert "3 flags for 2 stages" in told(pc.ScheduleError, lambda: build(checkpoint=[True] * 3))


def test_stages_that_a_schedule_cannot_deal_out() -> None:
    text = told(pc.ScheduleError, lambda: build(n_stages=4, schedule="zbv", devices=["cpu"] * 4))
    assert "devices= with 2 entries" in text


def test_no_loss() -> None:
    text = told(pc.InputError, lambda: build(loss_fn=None).step(X))
    assert "loss_fn=" in text


def test_loss_that_is_not_a_scalar() -> None:
    pipe = build(loss_fn=lambda out: out)
    assert "not a scalar" in told(pc.RunError, lambda: pipe.step(X))


def test_memory_limit_too_small_names_the_least_that_works() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    x = torch.randn(8, 64)
    text = told(pc.InfeasibleError, lambda: build(model, example_args=(x,), memory_limit=1000.0))
    assert "stage" in text or "node" in text
    least = float(text.split("memory_limit=")[1].split()[0].strip("(),."))
    assert build(model, example_args=(x,), memory_limit=least).plan.n_stages == 2
    told(pc.InfeasibleError, lambda: build(model, example_args=(x,), memory_limit=least * 0.99))


def test_memory_limits_count_devices() -> None:
    assert "one entry per pipeline device: 3 for 2" in told(pc.InputError, lambda: build(memory_limit=[1e9] * 3))


def test_data_dependent_control_flow_names_the_users_line() -> None:
    text = told(pc.TraceError, lambda: build(Branching()))
    line = next(i for i, words in enumerate(inspect.getsourcelines(Branching)[0]) if "x.sum()" in words)
    assert f"test_mistakes.py:{inspect.getsourcelines(Branching)[1] + line}" in text
    assert "if x.sum() > 0" in text


def test_damaged_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert str(path) in told(pc.PlanError, lambda: build(plan=path))
    path.write_text("{")
    assert "not a plan" in told(pc.PlanError, lambda: build(plan=path))
    text = build().plan.to_json()
    path.write_text(text.replace('"n_stages": 2', '"n_stages": "two"'))
    assert "$.n_stages" in told(pc.PlanError, lambda: build(plan=path))
    path.write_text(text.replace("pipecompile.plan/1", "pipecompile.plan/9"))
    assert "pipecompile.plan/9" in told(pc.PlanError, lambda: build(plan=path))
    path.write_text(text.replace('"placement": [\n  0,', '"placement": [\n  7,'))
    assert "placement" in told(pc.PlanError, lambda: build(plan=path))


def test_plan_of_another_model_or_of_other_stages() -> None:
    plan = build().plan
    other = nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(8, 4))
    assert "another graph: 6 of 6 nodes differ" in told(
        pc.PlanError, lambda: build(other, example_args=(torch.randn(8, 8, 1),), plan=plan)
    )
    assert "the plan has 2 stages" in told(pc.InputError, lambda: build(n_stages=3, plan=plan))


@pytest.mark.parametrize(
    ("text", "where"),
    [("0F0,0B0\n1F0,2F0garbage", "row 1 (line 2), cell 2"), ("0F0,0X0", "row 0 (line 1), cell 2"), ("", "no action")],
)
def test_damaged_csv(text: str, where: str) -> None:
    assert where in told(pc.ScheduleError, lambda: pc.Schedule.from_csv(text))


def test_a_schedule_that_deadlocks_shows_the_cycle() -> None:
    schedule = pc.Schedule.from_csv("0B0,0F0\n1F0,1B0\n")
    text = told(pc.VerifyError, lambda: pc.verify(schedule))
    assert "0B0" in text
    assert "->" in text
    assert told(pc.VerifyError, lambda: build(schedule=schedule, n_microbatches=1))


def test_a_failed_compile_leaves_the_model_as_it_was() -> None:
    model = Branching()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told(pc.TraceError, lambda: build(model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model(X).shape == (8, 4)


STEPS: list[tuple[dict[str, Any], Callable[[pc.Pipeline], Any], str]] = [
    ({}, lambda pipe: pipe.step(X, X, Y), r"forward\(x: .*step\(x, target=y\)"),
    ({}, lambda pipe: pipe.step(X, targets=Y), r"unexpected keyword argument 'targets'.*step\(x, target=y\)"),
    ({}, lambda pipe: pipe.step(X, target=Y + 10), r"the loss failed in forward of micro-batch 0: IndexError.*out of bounds.*the loss was called with \(float32 \[\d, 4\], int64 \[\d\]\).*try +loss_fn on"),
    ({}, lambda pipe: pipe.step(X, target=Y.tolist()), r"must be Tensor, not list.*the loss was called with \(float32 \[\d, 4\], a list\)"),
    ({"loss_fn": lambda out, y: out.sum().item()}, lambda pipe: pipe.step(X, target=Y), r"the loss is a float.*try +loss_fn"),
    ({}, lambda pipe: pipe.evaluate([(X, Y)], lambda out, y: out.argmax(1) == y), r"a tensor of shape \(8,\).*mean"),
    ({}, lambda pipe: pipe.evaluate([(X, Y)], lambda out, y: "good"), r"a str, not a number"),
    ({}, lambda pipe: pipe.report("."), r"is a directory, not a file.*report.html"),
    ({}, pc.simulate, r"neither a Schedule nor a Program.*pipe.program"),
]  # fmt: skip
Y = torch.randint(4, (8,))


@pytest.mark.filterwarnings("ignore")
def test_what_newcomers_write_in_a_step_is_told_what_to_write() -> None:
    plain = build()
    for options, action, words in STEPS:
        pipe = build(**options) if options else plain
        with pytest.raises(pc.PipecompileError, match=f"(?s){words}"):
            action(pipe)


def test_a_loss_that_is_a_class_is_refused_before_anything_runs() -> None:
    assert "loss_fn=CrossEntropyLoss()" in told(pc.InputError, lambda: build(loss_fn=nn.CrossEntropyLoss))


def test_a_report_makes_the_folder_of_its_path(tmp_path: Path) -> None:
    assert build().report(tmp_path / "new" / "report.html").exists()


def test_a_public_name_that_there_is_not_asks_for_the_one_that_is_meant() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'compile'"):
        _ = pc.complie
    assert not hasattr(pc, "zzzzzz")
