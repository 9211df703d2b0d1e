"""Steps that run what the user wrote: equal to eager, or refused with the line and the reason."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.written_steps import fitted
from pipecompile.errors import InputError, PipecompileError, ScheduleError, VerifyError
from pipecompile.ir import Kind, Op, Program, Route
from pipecompile.ir.program_text import parse_program
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.passes import lower
from tests.support.eager import accumulate, assert_same, square_loss

COUNT = 4
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """A layer that reads the first value and the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, first: torch.Tensor, latest: torch.Tensor) -> torch.Tensor:
        return self.linear(first + latest).tanh()


class Skips(nn.Module):
    """Four layers, the first of which every later one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = latest = self.layers[0](x, x)
        for layer in self.layers[1:]:
            latest = layer(first, latest)
        return latest


def piped(model: nn.Module, n_stages: int = 4, **options: Any) -> pc.Pipeline:
    usual = {"example_args": (X,), "loss_fn": square_loss, "cost": "analytic", "n_microbatches": COUNT}
    usual |= {} if "plan" in options else {"split_before": [f"layers.{i}" for i in range(1, n_stages)]}
    return pc.compile(model, n_stages, **(usual | {"devices": ["cpu"] * n_stages} | options))


@pytest.fixture
def model() -> Skips:
    torch.manual_seed(0)
    return Skips()


@pytest.fixture
def lowered(model: Skips) -> pc.Pipeline:
    """A pipeline under 1F1B after a step without a target, whose routes and plan others take."""
    pipe = piped(copy.deepcopy(model))
    pipe.step(X)
    return pipe


def stepped(model: nn.Module, written: Any, plan: Any, **options: Any) -> pc.Pipeline:
    """Run a step of what is written, and compare gradients with eager."""
    reference = copy.deepcopy(model)
    pipe = piped(model, schedule=written, plan=plan, **options)
    loss = pipe.step(X)
    expected = accumulate(reference, X, COUNT)
    assert torch.allclose(loss, expected)
    assert_same(model, reference, tolerance=1e-5)
    return pipe


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h2"])
def test_a_program_runs_as_it_is(name: str, model: Skips, lowered: pc.Pipeline) -> None:
    program = lower(pc.build_schedule(name, 4, COUNT), lowered.program.routes, receive_ahead=2)
    pipe = stepped(model, program, lowered.plan)
    assert pipe.program == program
    assert pipe.schedule == pc.build_schedule(name, 4, COUNT)
    assert [span.name for span in pipe.measured.compute(1)] == [str(i.action) for i in program.rows[1] if i.action]


def test_a_file_edited_by_hand_runs_in_threads(model: Skips, lowered: pc.Pipeline, tmp_path: Path) -> None:
    """The first device frees the input of its first forward last, so the next inputs need another buffer."""
    lowered.dump(tmp_path)
    lines = (tmp_path / "program.txt").read_text().splitlines()
    head, end = lines.index("device 0"), lines.index("device 1")
    name = next(line for line in lines if line.startswith("route") and ": host ->" in line).split()[1].rstrip(":")
    row = [line for line in lines[head + 1 : end] if line != f"  FREE {name}#0[0]"]
    assert len(row) == end - head - 2
    row = [line.replace(f"{name}#{m}[0]", f"{name}#{m}[1]") for m in (1,) for line in row]
    row = [line.replace(f"{name}#{m}[0]", f"{name}#{m}[1]") for m in (2, 3) for line in row][: len(row)]
    row = [line if f"{name}#3[0]" not in line else line.replace(f"{name}#3[0]", f"{name}#3[1]") for line in row]
    edited = tmp_path / "edited.txt"
    edited.write_text("\n".join([*lines[: head + 1], *row, f"  FREE {name}#0[0]", "", *lines[end:]]))
    pipe = stepped(model, edited, tmp_path / "plan.json", dispatch="threads")
    assert pipe.program == parse_program(edited.read_text()) != lowered.program
    assert str(pipe.program.rows[0][-1]) == f"FREE {name}#0[0]"


def test_the_dump_and_the_prediction_are_of_what_is_written(model: Skips, lowered: pc.Pipeline, tmp_path: Path) -> None:
    program = lower(pc.build_schedule("gpipe", 4, COUNT), lowered.program.routes)
    pipe = stepped(model, program, lowered.plan)
    pipe.dump(tmp_path)
    assert parse_program((tmp_path / "program.txt").read_text()) == program
    assert "no pass has run" in (tmp_path / "passes.txt").read_text()
    assert pipe.simulate().makespan == piped(Skips(), schedule="gpipe", plan=lowered.plan).simulate().makespan


def test_a_plan_file_goes_with_a_program_file(model: Skips, lowered: pc.Pipeline, tmp_path: Path) -> None:
    """The plan has the cut, the program the order; a pipeline that is copied or pickled has both."""
    lowered.plan.save(tmp_path / "plan.json")
    lowered.program.save(tmp_path / "mine.txt")
    pipe = stepped(model, tmp_path / "mine.txt", pc.Plan.load(tmp_path / "plan.json"))
    expected = [p.grad for p in pipe.parameters()]
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        other.zero_grad()
        other.step(X)
        assert other.program == pipe.program
        assert all(torch.equal(p.grad, e) for p, e in zip(other.parameters(), expected, strict=True))


def test_a_pipeline_changes_to_a_program_and_back(lowered: pc.Pipeline) -> None:
    program = lower(pc.build_schedule("gpipe", 4, COUNT), lowered.program.routes)
    before = lowered.program
    lowered.reschedule(program).step(X)
    assert lowered.program == program
    lowered.reschedule("1f1b").step(X)
    assert lowered.program == before


def test_other_runs_are_not_those_of_the_program(model: Skips, lowered: pc.Pipeline) -> None:
    """The program is that of a step with its backward; calls and steps without gradients are lowered as ever."""
    program = lower(pc.build_schedule("zb-h1", 4, COUNT), lowered.program.routes)
    pipe = piped(model, schedule=program, plan=lowered.plan)
    with torch.no_grad():
        parts = [model(part) for part in X.chunk(COUNT)]
        assert torch.equal(pipe.step(X), sum(square_loss(part) / COUNT for part in parts))
        assert torch.equal(pipe(X), torch.cat(parts))
    assert pipe.program == program


def test_lists_of_micro_batches_run_the_program(model: Skips, lowered: pc.Pipeline) -> None:
    program = lower(pc.build_schedule("gpipe", 4, COUNT), lowered.program.routes)
    reference = copy.deepcopy(model)
    pipe = piped(model, schedule=program, plan=lowered.plan)
    pipe.step(microbatches=[{"x": part} for part in X.chunk(COUNT)])
    accumulate(reference, X, COUNT)
    assert_same(model, reference, tolerance=1e-5)
    assert pipe.program == program


# -- refused --------------------------------------------------------------------------------------------------------


def changed(program: Program, change: Callable[[Route], Route]) -> Program:
    return replace(program, routes=tuple(map(change, program.routes)))


def test_a_program_of_another_cut_is_refused_with_its_lines(model: Skips, lowered: pc.Pipeline, tmp_path: Path) -> None:
    """`compile` with an example refuses the program before any step."""
    lower(pc.build_schedule("1f1b", 4, COUNT)).save(tmp_path / "mine.txt")
    with pytest.raises(ScheduleError, match="does not fit the model as it is cut") as caught:
        piped(model, schedule=tmp_path / "mine.txt", plan=lowered.plan)
    assert "line 2: route v0: 0 -> 1, 0 bytes: the step has no such value" in caught.value.where.replace(
        ", gradient", ""
    )
    assert "the program lacks route" in caught.value.where
    assert "plan.json" in caught.value.hint


def test_a_step_with_a_target_needs_a_program_with_a_target(model: Skips, lowered: pc.Pipeline) -> None:
    pipe = piped(model, schedule=lowered.program, plan=lowered.plan, loss_fn=lambda y, t=None: y.square().mean())
    pipe.step(X)
    with pytest.raises(ScheduleError, match="lacks route @target"):
        pipe.step(X, target=X)


def test_another_number_of_micro_batches_is_refused(model: Skips, lowered: pc.Pipeline) -> None:
    pipe = piped(model, schedule=lowered.program, plan=lowered.plan)
    with pytest.raises(ScheduleError, match="for 4 micro-batches, the batch gives 2"):
        pipe.step(X[:2])


def test_sums_that_round_otherwise_need_leave(model: Skips) -> None:
    """Stages 2 and 3 on one device may add up the gradients of what both read; 1 and 2 may not, since eager adds 3 first."""
    csv = "0F0,0F1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n3F0,3B0,3F1,3B1\n"
    schedule, options = pc.Schedule.from_csv(csv), {"n_microbatches": 2, "devices": ["cpu"] * 3}
    base = piped(copy.deepcopy(model), schedule=schedule, **options)
    base.step(X)
    summed = lower(schedule, base.program.routes, sums="device")
    assert any(route.sums for route in summed.routes)
    with pytest.raises(ScheduleError, match="another order"):
        piped(model, schedule=summed, plan=base.plan, **options)
    pipe = piped(model, schedule=summed, plan=base.plan, gradient_sums="device", **options)
    reference = copy.deepcopy(model)
    pipe.step(X)
    accumulate(reference, X, 2)
    assert_same(model, reference, tolerance=1e-5)


def test_where_copies_run_beside_compute_received_values_must_stay(lowered: pc.Pipeline) -> None:
    specialization = lowered._cache.latest
    routes = lowered.program.routes
    early, late = (lower(lowered.schedule, routes, overlap=overlap) for overlap in (False, True))
    assert fitted(WrittenProgram.of(early), specialization, routes) == early
    specialization.overlaps = True
    assert fitted(WrittenProgram.of(late), specialization, routes) == late
    with pytest.raises(ScheduleError, match=r"line .*copies run beside compute") as caught:
        fitted(WrittenProgram.of(early), specialization, routes)
    assert "FREE" in caught.value.where


@pytest.mark.parametrize(
    ("options", "words"),
    [({"checkpoint": "always"}, "an R for each forward"), ({"checkpoint": (True, False, False, False)}, "an R for each"),
     ({"across_batch": "exact"}, "two programs"), ({"n_microbatches": "auto"}, "a Schedule")],
)  # fmt: skip
def test_keywords_that_a_program_excludes_are_refused(
    options: dict[str, Any], words: str, model: Skips, lowered: pc.Pipeline
) -> None:
    with pytest.raises(InputError, match=words):
        piped(model, schedule=lowered.program, plan=lowered.plan, **options)


def test_an_illegal_program_is_refused_before_anything_is_recorded(model: Skips, lowered: pc.Pipeline) -> None:
    program = lowered.program
    rows = (tuple(i for i in program.rows[0] if i.op is not Op.FREE), *program.rows[1:])
    with pytest.raises(VerifyError, match=r"line .*is never freed"):
        pc.compile(model, 4, schedule=replace(program, rows=rows))


def test_a_program_without_a_backward_computes_the_loss_alone(model: Skips, lowered: pc.Pipeline) -> None:
    program = lower(pc.build_schedule("forward", 4, COUNT), lowered.program.routes)
    pipe = piped(model, schedule=program, plan=lowered.plan)
    assert torch.allclose(pipe.step(X), square_loss(model(X)))
    assert all(p.grad is None for p in model.parameters())
    assert {i.action.kind for row in pipe.program.rows for i in row if i.action} == {Kind.FORWARD}


def test_every_error_is_ours(model: Skips, lowered: pc.Pipeline, tmp_path: Path) -> None:
    """Each line of a program taken away or written twice: refused, whatever the line says."""
    lines = str(lowered.program).splitlines()
    for index in range(0, len(lines), 3):
        for edited in (lines[:index] + lines[index + 1 :], [*lines[:index], lines[index], *lines[index:]]):
            (tmp_path / "mine.txt").write_text("\n".join(edited))
            with pytest.raises(PipecompileError):
                piped(model, schedule=tmp_path / "mine.txt", plan=lowered.plan)
