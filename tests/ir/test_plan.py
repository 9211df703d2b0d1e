"""A plan in a file: read as data, for the graph it was made for and no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import square_loss
from tests.support.models import UNet

X = torch.randn(4, 3, 16, 16)


def compiled(model: nn.Module, **options: object) -> pc.Pipeline:
    return pc.compile(
        model, 3, example_args=(X,), cost=options.pop("cost", "analytic"), n_microbatches=2, devices=["cpu"] * 3,
        loss_fn=square_loss, **options,
    )  # fmt: skip


def mean_loss(model: nn.Module, x: torch.Tensor) -> float:
    """Over two micro-batches, as BatchNorm sees them."""
    return sum(square_loss(model(part)).item() for part in x.chunk(2)) / 2


def test_a_plan_from_a_file_measures_and_solves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    model = UNet()
    pipe = compiled(model, pin={"down.0": 1})
    pipe.plan.save(path)
    monkeypatch.setattr("pipecompile.driver.phases.make_plan", None)
    again = compiled(model, plan=path, cost="profile")
    assert again.plan == pipe.plan
    assert again.plan.price == pipe.plan.price > 0
    assert again.plan.stages[1].forced == ("pin down.0",)
    assert [stage.nodes for stage in again.stages] == [stage.nodes for stage in pipe.stages]
    assert again.step(X).item() == pytest.approx(mean_loss(model, X), rel=1e-5)


def test_a_plan_serves_other_batches_and_other_weights(tmp_path: Path) -> None:
    compiled(UNet()).plan.save(tmp_path / "plan.json")
    other = UNet()
    pipe = compiled(other, plan=str(tmp_path / "plan.json"))
    x = torch.randn(6, 3, 32, 32)
    assert pipe.step(x).item() == pytest.approx(mean_loss(other, x), rel=1e-5)
    assert pipe.plan.samples == 2
    assert "per micro-batch of 2 samples" in str(pipe)  # of the plan, not of the step


class Net(nn.Module):
    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Conv2d(3, 8, 3), activation(), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.first(x))) * self.scale()

    def scale(self) -> torch.Tensor:
        return self.first.weight.mean()


class Changed(Net):
    def scale(self) -> torch.Tensor:
        return self.first.weight.sum()


def test_a_mismatch_shows_the_first_nodes_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    compiled(Net(nn.ReLU)).plan.save(path)
    with pytest.raises(pc.PlanError) as caught:
        compiled(Changed(nn.ReLU), plan=path)
    text = str(caught.value)
    assert "nodes differ" in text
    assert "the plan has mean = call_method mean(" in text
    assert "the model sum" in text
    assert "without plan=" in text


def test_a_file_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    compiled(Net(nn.ReLU)).plan.save(path)
    known = json.loads(path.read_text())
    for key, value, text in (
        ("stage_of", {**known["stage_of"], "act": 7}, "stage 7"),
        ("stage_of", {**known["stage_of"], "first": 2, "act": 0}, "needs first"),
        ("stage_of", {"first": 0}, "does not cover the graph"),
        ("fingerprint", "0", "another graph"),
        ("format", "pipecompile.plan/99", "plan/99"),
        ("stages", "none", r"\$.stages"),
    ):
        path.write_text(json.dumps({**known, key: value}))
        with pytest.raises(pc.PipecompileError, match=text):
            compiled(Net(nn.ReLU), plan=path)


def test_a_file_of_a_hostile_depth_is_refused() -> None:
    with pytest.raises(pc.PlanError, match="recursion"):
        pc.Plan.from_json('{"a":' * 100_000)


def test_the_format_of_the_file_keeps_its_name(tmp_path: Path) -> None:
    """The name does not follow the module: files written before the module moved must load."""
    path = tmp_path / "plan.json"
    compiled(UNet()).plan.save(path)
    assert json.loads(path.read_text())["format"] == "pipecompile.plan/1"


def test_nothing_moves_before_the_plan_is_known_to_fit(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    compiled(Net(nn.ReLU)).plan.save(path)
    model = Changed(nn.ReLU)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()}
    with pytest.raises(pc.PlanError):
        compiled(model, plan=path)
    for name, tensor in model.named_parameters():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_repr_is_one_short_line() -> None:
    plan = pc.Plan("0", 1, ("cpu",), (0,), {"a": 0}, (), (), 3.0, 1.5, "feasible", "dp", "analytic")
    assert repr(plan) == "Plan(n_stages=1, devices=('cpu',), bottleneck=3 s, gap=50.0%, feasible)"


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("stages", lambda stages: stages[:-1], "stages has 2 entries"),
        ("stages", lambda stages: stages[::-1], "entry 0 of stages is stage 2"),
        ("placement", lambda placement: placement[:-1], "placement has 2 entries"),
        ("placement", lambda placement: [9, *placement[1:]], "placement has device 9 for stage 0"),
        ("recompute", lambda _: [True], "recompute has 1 entry"),
    ],
)
def test_a_damaged_plan_is_refused_when_it_is_read(key: str, change: Callable[[Any], Any], message: str) -> None:
    """Its table in a notebook was an IndexError."""
    data = json.loads(compiled(UNet()).plan.to_json())
    data[key] = change(data[key])
    with pytest.raises(pc.PlanError, match=f"the plan is damaged: n_stages is 3.*\n.*{message}"):
        pc.Plan.from_json(json.dumps(data))


def test_a_plan_of_other_devices_names_those_that_run_it() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 4))
    plan = compiled(model).plan
    elsewhere = plan.on([f"cuda:{number}" for number in range(len(plan.devices))])
    assert [stage.device for stage in elsewhere.stages] == [elsewhere.devices[device] for device in plan.placement]
    assert elsewhere.on(plan.devices) == plan
    assert plan.on(["cpu"] * 9) is plan
    assert compiled(model, plan=elsewhere).plan == plan
