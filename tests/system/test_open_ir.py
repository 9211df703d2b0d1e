"""Programs and passes of users on whole models: gradients of eager, on CPU and on emulated devices, with copies beside compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.backend import Backend
from pipecompile.driver.programs import lower_step, step_schedule
from pipecompile.graph import backward_split as divided
from pipecompile.ir import Kind, Op, Program
from pipecompile.ir.program_text import parse_program
from pipecompile.passes import lower
from pipecompile.passes.split_backward import split_backward
from tests.distributed.case_models import Example, gpt2, mean_square, resnet18, unet
from tests.support.eager import looped, off
from tests.support.emulated import EmulatedExecutable

COUNT = 4
MODELS = [unet, resnet18, gpt2]


def frees_last(program: Program) -> Program:
    """Free nothing before the end of a row."""
    rows = tuple(tuple(sorted(row, key=lambda instruction: instruction.op is Op.FREE)) for row in program.rows)
    return replace(program, rows=rows)


PASSES = (pc.UserPass(split_backward, before="compute"), pc.UserPass(frees_last, before="slots"))


def edited(program: Program, path: Path) -> Path:
    """Write the text of a program with a change by hand: a SEND comes before the FREE of another value."""
    lines, n_changes = str(program).splitlines(), 0
    for index, (line, following) in enumerate(zip(lines, lines[1:], strict=False)):
        freed, sent = line.split(), following.split()
        if freed[0] == "FREE" and sent[0] == "SEND" and freed[1] != sent[1]:
            lines[index : index + 2] = [following, line]
            n_changes += 1
    assert n_changes >= COUNT
    path.write_text("\n".join(lines))
    return path


def piped(model: nn.Module, inputs: dict[str, torch.Tensor], **options: Any) -> pc.Pipeline:
    usual = {
        "n_microbatches": COUNT,
        "loss_fn": mean_square,
        "cost": "analytic",
        "batch_norm": "each",
        "devices": ["cpu"] * 2,
    }
    return pc.compile(model, 2, example_kwargs=inputs, **(usual | options))


def outcome(pipe: pc.Pipeline, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    pipe.zero_grad()
    loss = pipe.step(**inputs)
    return {"loss": loss} | {
        f"{n}.grad": p.grad.clone() for n, p in pipe.model.named_parameters() if p.grad is not None
    }


def program_of(
    model: nn.Module, inputs: dict[str, torch.Tensor], path: Path, *, overlap: bool = False
) -> dict[str, Any]:
    """Return the options that run a program edited by hand: for one memory, or for devices that copy beside compute."""
    pipe = piped(copy.deepcopy(model), inputs)
    pipe.step(**inputs)
    pipe.plan.save(path / "plan.json")
    program = lower(pipe.schedule, pipe.program.routes, overlap=overlap)
    return {"schedule": edited(program, path / "mine.txt"), "plan": path / "plan.json"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", MODELS)
def test_an_edited_program_has_the_gradients_of_eager(make: Callable[[], Example], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    eager = copy.deepcopy(model)
    pipe = piped(model, inputs, **program_of(model, inputs, tmp_path))
    assert off(outcome(pipe, inputs), looped(eager, inputs, COUNT, mean_square)) < 1e-5
    assert pipe.program == parse_program((tmp_path / "mine.txt").read_text())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", MODELS)
def test_passes_of_the_user_have_the_gradients_of_eager(
    make: Callable[[], Example], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(divided.MIN_WEIGHT_FLOPS, "cpu", 0.0)
    torch.manual_seed(0)
    model, inputs = make()
    eager = copy.deepcopy(model)
    pipe = piped(model, inputs, passes=PASSES)
    assert off(outcome(pipe, inputs), looped(eager, inputs, COUNT, mean_square)) < 1e-5
    kinds = {i.action.kind for row in pipe.program.rows for i in row if i.action is not None}
    assert kinds == {Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}
    assert all(row[-1].op is Op.FREE and row[-COUNT].op is Op.FREE for row in pipe.program.rows)
    pipe.dump(tmp_path)
    text = (tmp_path / "passes.txt").read_text()
    assert "== split_backward (of the user, before compute): " in text
    assert "== frees_last (of the user, before slots): " in text
    assert "another program" not in text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["program", "passes"])
@pytest.mark.parametrize("make", MODELS)
def test_on_emulated_devices_they_give_what_one_thread_gives(
    make: Callable[[], Example], what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Backend, "memories", lambda _, devices, placement: range(len(devices)))
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    options = program_of(model, inputs, tmp_path, overlap=True) if what == "program" else {"passes": PASSES}
    pipe = piped(model, inputs, dispatch="inline", check=False, **options)
    expected = outcome(pipe, inputs)
    build = pipe._cache.latest
    routes, build.overlaps = pipe.program.routes, True
    executable = EmulatedExecutable(pipe, COUNT, lambda _: lower_step(build, step_schedule(build, COUNT), routes))
    try:
        assert executable.was_harmed  # it is not what the schedule is lowered to
        for seed in range(3):
            executable.streams.reseed(seed)
            found = outcome(pipe, inputs)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), seed
        assert executable.n_runs == 3
    finally:
        executable.streams.close()


def test_a_function_that_changes_its_mind_is_noted_in_the_dump(tmp_path: Path) -> None:
    calls: list[int] = []

    def moody(schedule: pc.Schedule) -> pc.Schedule:
        calls.append(1)
        return split_backward(schedule) if len(calls) > 2 else schedule

    model, inputs = unet()
    pipe = piped(model, inputs, passes=[pc.UserPass(moody, before="compute")])
    pipe.step(**inputs)
    pipe.dump(tmp_path)
    assert "a pass made another program this time" in (tmp_path / "passes.txt").read_text()
