"""Checkpointing gives the numbers of a run that keeps everything: random draws, buffers, surroundings; and notes nothing twice."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.runtime.cells import recompute
from pipecompile.runtime.cells.recompute import StageRun, checkpointed_cell, kept_apart, recompute_cell
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.runtime.registers import Frame
from pipecompile.tracing.state.random_states import RANDOM_LOCK
from tests.support.eager import accumulate, assert_same, square_loss
from tests.support.models import UNet

MODES: list[Any] = ["never", "always", "except_last", (True, False, True)]


def piped(model: nn.Module, x: torch.Tensor, **options: Any) -> pc.Pipeline:
    given = {"n_microbatches": 4, "cost": "analytic", "loss_fn": square_loss, "devices": ["cpu"] * 3} | options
    return pc.compile(model, 3, example_args=(x,), **given)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("checkpoint", MODES)
def test_all_modes_on_a_model_with_skips_and_running_statistics(checkpoint: Any) -> None:
    torch.manual_seed(0)
    model, x = UNet(depth=2), torch.randn(7, 3, 16, 16)
    for schedule, dispatch in (("1f1b", "inline"), ("zb-h1", "inline"), ("gpipe", "threads")):
        mine, eager = copy.deepcopy(model), copy.deepcopy(model)
        pipe = piped(mine, x, checkpoint=checkpoint, schedule=schedule, dispatch=dispatch)
        for _ in range(2):
            torch.testing.assert_close(pipe.step(x), accumulate(eager, x, 4), rtol=1e-6, atol=0)
        assert_same(mine, eager, 0.0 if dispatch == "inline" else 1e-5)


def test_pipe_of_x_recomputes_in_its_backward() -> None:
    torch.manual_seed(0)
    model, x = UNet(depth=2), torch.randn(7, 3, 16, 16)
    eager = copy.deepcopy(model)
    pipe = piped(model, x, checkpoint="always")
    square_loss(pipe(x)).backward()
    square_loss(torch.cat([eager(part) for part in torch.tensor_split(x, 4)])).backward()
    assert_same(model, eager, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        made = pipe(x)
        parts = torch.cat([eager(part) for part in torch.tensor_split(x, 4)])
    square_loss(made.float()).backward()  # outside: the recomputation brings autocast back
    square_loss(parts.float()).backward()
    assert_same(model, eager, 2e-2)


class Masks(nn.Module):
    """Each sample's output is masked; the gradient of the input shows the mask of the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.ParameterList(torch.ones(()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scale:
            x = F.dropout(x * scale, 0.2)
        return x


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_the_mask_of_dropouts_is_that_of_their_gradient(dispatch: str) -> None:
    model = Masks()
    made: list[torch.Tensor] = []

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        pc.is_recomputing()  # a loss that asks this keeps what it appends in a recomputation
        made.append(output.detach())
        return output.sum()

    x = torch.ones(200, 16, requires_grad=True)
    for checkpoint in ("always", "except_last"):
        pipe = piped(model, x, loss_fn=loss_fn, loss_reduction="sum", n_microbatches=50, dispatch=dispatch,
                     checkpoint=checkpoint, schedule="1f1b")  # fmt: skip
        made.clear(), x.__setattr__("grad", None)
        pipe.step(x)
        recomputed = 50 if checkpoint == "always" else 49
        assert len(made) == 50 + recomputed
        assert x.grad is not None
        masks = sorted(map(_key, torch.tensor_split(x.grad != 0, 50)))
        seen = sorted(map(_key, (output != 0 for output in made)))
        assert sorted(set(seen)) == masks, "of the forward, again in the recomputation, and in the gradient"


def _key(mask: torch.Tensor) -> str:
    return "".join("01"[int(bit)] for bit in mask.flatten())


def test_random_numbers_go_on_as_without_checkpointing() -> None:
    outcomes = []
    for checkpoint in ("never", "always"):
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)),
            torch.randn(9, 8),
        )
        pipe = piped(model, x, checkpoint=checkpoint, dispatch="inline")
        for _ in range(2):
            pipe.step(x)
        outcomes.append([*(parameter.grad for parameter in model.parameters()), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


class Follows(nn.Module):
    """Its output depends on a buffer that each call changes, and it notes what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.seen = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x.detach().mean())
        made = self.layer(x) + self.mean.clone()
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return made


def test_buffers_counters_and_lists_change_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Follows(), nn.ReLU(), Follows(), nn.ReLU(), Follows())
    eager, x = copy.deepcopy(model), torch.randn(8, 4)
    pipe = piped(model, x, checkpoint="always", schedule="gpipe")
    for _ in range(2):
        torch.testing.assert_close(pipe.step(x), accumulate(eager, x, 4), rtol=0, atol=0)
    assert_same(model, eager)
    for mine, theirs in zip(model, eager, strict=True):
        if isinstance(mine, Follows):
            assert (mine.calls, len(mine.seen)) == (theirs.calls, len(theirs.seen)) == (8, 8)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first, self.again = nn.Linear(4, 4), 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if pc.is_recomputing():
            self.again += 1
        else:
            self.first += 1
        return self.layer(x)


@pytest.mark.parametrize(("checkpoint", "again"), [("never", 0), ("except_last", 3), ("always", 4)])
def test_a_module_can_ask_whether_it_is_recomputed(checkpoint: str, again: int) -> None:
    counts, x = Counts(), torch.randn(8, 4)
    pipe = piped(nn.Sequential(nn.Linear(4, 4), counts, nn.Linear(4, 4)), x, checkpoint=checkpoint)
    counts.first = counts.again = 0
    pipe.step(x)
    assert (counts.first, counts.again) == (4, again)
    assert not pc.is_recomputing()


class Mixed(nn.Module):
    """Integers, booleans and what is not a tensor cross the cuts; one input is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, bias: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        bias.add_(1)
        mask, length = tokens > 3, tokens.argmax(1)
        h = self.a(self.embed(tokens).relu() + bias[:, None])
        h = self.b(torch.where(mask[..., None], h, h * scale)) + length[:, None, None]
        return {"h": h * mask[..., None], "length": length}


@pytest.mark.parametrize("checkpoint", MODES)
def test_integers_and_plain_values_cross_cuts_and_inputs_are_written_once(checkpoint: Any) -> None:
    torch.manual_seed(0)
    model, tokens = Mixed(), torch.randint(9, (7, 5))
    eager, bias = copy.deepcopy(model), torch.randn(7, 4)
    theirs = bias.clone()

    def loss_fn(output: dict[str, torch.Tensor]) -> torch.Tensor:
        return output["h"].square().mean()

    pipe = pc.compile(model, 3, n_microbatches=3, cost="analytic", loss_fn=loss_fn, devices=["cpu"] * 3,
                      checkpoint=checkpoint)  # fmt: skip
    loss = pipe.step(tokens, bias, scale=0.5)
    parts = [(t, b) for t, b in zip(tokens.tensor_split(3), theirs.tensor_split(3), strict=True)]
    losses = [loss_fn(eager(t, b, 0.5)) * (len(t) / 7) for t, b in parts]
    for part in losses:
        part.backward()
    torch.testing.assert_close(loss, torch.stack(losses).sum().detach())
    assert torch.equal(bias, theirs)
    assert_same(model, eager)


def test_forwards_keep_nothing_but_their_inputs() -> None:
    """Tensors alive that the layers' activations saved: all micro-batches', or one's."""
    kept: dict[str, int] = {}
    for checkpoint in ("never", "always"):
        model = nn.Sequential(
            *(m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()))
        )
        x = torch.randn(16, 8)
        pipe = piped(model, x, checkpoint=checkpoint, schedule="gpipe", n_microbatches=8)
        kept[checkpoint] = _peak(lambda pipe=pipe, x=x: pipe.step(x))
    assert kept["always"] < 0.5 * kept["never"], kept


def _peak(run: Any) -> int:
    """The most tensors that autograd held saved at one time."""
    alive, peak = set[int](), 0

    class Token:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal peak
            self.tensor = tensor
            alive.add(id(self))
            peak = max(peak, len(alive))

        def __del__(self) -> None:
            alive.discard(id(self))

    gc.collect()
    with torch.autograd.graph.saved_tensors_hooks(Token, lambda token: token.tensor):
        run()
    return peak


def test_recomputations_ahead_of_their_gradients() -> None:
    torch.manual_seed(0)
    model, x = UNet(depth=2), torch.randn(8, 3, 16, 16)
    eager = copy.deepcopy(model)
    plain = piped(copy.deepcopy(model), x, checkpoint="always", schedule="gpipe")
    pipe = piped(model, x, checkpoint="always", schedule="gpipe", restored=3)
    assert pipe.schedule != plain.schedule
    assert pipe.simulate().makespan < plain.simulate().makespan
    pipe.step(x)
    accumulate(eager, x, 4)
    assert_same(model, eager)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The generator of a pretended GPU."""
    generator = torch.Generator()
    of_cpu = recompute.random_state, recompute.set_random_state
    monkeypatch.setattr(
        recompute,
        "random_state",
        lambda device: generator.get_state() if device.type == "cuda" else of_cpu[0](device),
    )
    monkeypatch.setattr(
        recompute,
        "set_random_state",
        lambda state, device: generator.set_state(state) if device.type == "cuda" else of_cpu[1](state, device),
    )
    return generator


@pytest.mark.parametrize("effects", [SideEffects(draws=True), SideEffects(runs_python=True, holders=(None,))])
def test_a_stage_on_a_gpu_draws_from_the_cpu_as_well(effects: SideEffects, gpu: torch.Generator) -> None:
    """A layer that is left out at random often draws on the CPU: a recomputation left out another one."""
    drawn = list[list[float]]()

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        drawn.append([torch.rand(()).item(), torch.rand((), generator=gpu).item()])
        return (x * drawn[-1][0],)

    stage = StageRun(function, None, effects, torch.device("cuda:0"))
    frame = Frame([torch.ones(2, requires_grad=True), None, None, None], [])
    checkpointed_cell(stage, [0], [1], 2)(frame)
    after = torch.rand(()), torch.rand((), generator=gpu)
    recompute_cell(stage, [0], 2, 3)(frame)
    assert drawn[0] == drawn[1]
    assert drawn[0] != [*map(float, after)]


def test_stages_in_threads_on_one_gpu_draw_one_after_the_other(gpu: torch.Generator) -> None:
    """A forward drew between another's saving of the state of the generator and its draw: the recomputation had other numbers."""
    free = list[bool]()

    def run(_frame: Frame) -> None:
        with ThreadPoolExecutor(1) as pool:
            free.append(pool.submit(RANDOM_LOCK.acquire, blocking=False).result())

    stage = StageRun(lambda *_: (), None, SideEffects(draws=True), torch.device("cuda:0"))
    kept_apart(run, stage, saves=True, recomputes=True)(Frame([], []))
    assert free == [False]
