"""Every schedule runs: gradients equal to eager on models with skips and tied weights, in the order that is dumped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.backend import Backend
from pipecompile.graph import backward_split as divided
from pipecompile.ir import Action, Kind
from pipecompile.ir.directions import placement_of
from pipecompile.runtime import interpreter
from pipecompile.schedules import CATALOGUE
from tests.support.eager import accumulate, assert_same, square_loss
from tests.support.models import UNet

N_STAGES, COUNT = 4, 5
SAMPLES = 2 * COUNT + 3
TRAINING = [*(name for name, entry in CATALOGUE.items() if not entry.has_slices and name != "forward"), "auto"]


@pytest.fixture(autouse=True)
def _every_weight_is_worth_a_w(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(divided.MIN_WEIGHT_FLOPS, "cpu", 0.0)
    monkeypatch.setattr(interpreter, "may_join_backward", lambda *_: False)


WITH_COPIES = [name for name, entry in CATALOGUE.items() if entry.has_copies]


def devices_of(name: str) -> list[int]:
    """On how many devices a schedule can put four stages."""
    chunks = CATALOGUE[name].chunks if name in CATALOGUE else None
    is_looped = name.startswith("interleaved") or (name in CATALOGUE and not CATALOGUE[name].compared)
    return [N_STAGES // chunks] if chunks else [2] if is_looped else [2, 4]


def runs() -> list[tuple[str, int]]:
    return [(name, count) for name in TRAINING for count in devices_of(name)]


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double(), {"input_ids": torch.randint(40, (SAMPLES, 8))}


def logits_loss(output: Any) -> torch.Tensor:
    return square_loss(output if isinstance(output, torch.Tensor) else output.logits)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], float]] = {
    "unet": (lambda: (UNet(depth=2, width=4), {"x": torch.randn(SAMPLES, 3, 16, 16)}), 0.0),
    "gpt2": (gpt2, 1e-12),
}
"""Name -> (model and inputs, tolerance): a tied weight is summed in another order than in eager."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven micro-batches, each schedule inline and in threads; the tied weight of GPT-2 is mirrored on other stages."""
    monkeypatch.setattr(Backend, "memories", lambda _, devices, placement: range(len(devices)))
    torch.manual_seed(0)
    make, tolerance = MODELS[name]
    start, inputs = make()
    key, x = next(iter(inputs.items()))
    reference = copy.deepcopy(start)
    expected = accumulate(reference, x, COUNT, lambda made: logits_loss(made))
    for dispatch in ("inline", "threads"):
        for n_devices in (2, 4):
            model = copy.deepcopy(start)
            pipe = pc.compile(
                model, N_STAGES, example_kwargs={key: x}, n_microbatches=COUNT, loss_fn=logits_loss, cost="analytic",
                devices=["cpu"] * n_devices, dispatch=dispatch, schedule="gpipe", tied="apart",
            )  # fmt: skip
            allowed = tolerance if dispatch == "inline" else max(tolerance, 1e-5)
            for schedule in (schedule for schedule, count in runs() if count == n_devices):
                if name == "unet" and schedule in WITH_COPIES:
                    continue  # statistics come in the order of the schedule, with a warning
                model.load_state_dict(start.state_dict())
                model.zero_grad()
                loss = pipe.reschedule(schedule).step(**{key: x})
                torch.testing.assert_close(loss, expected, rtol=allowed, atol=0)
                same_but_for_rounding = allowed or (1e-6 if CATALOGUE.get(schedule) is None else 0.0)
                assert_same(model, reference, same_but_for_rounding)
                assert pipe.measured is not None
                for device, row in enumerate(pipe.schedule.rows):
                    spans = [
                        span for span in pipe.measured.spans if span.device == device
                    ]  # copies have tracks of their own
                    assert [span.name for span in sorted(spans, key=lambda s: s.start)] == list(map(str, row))


class Marked(torch.autograd.Function):
    """Identity that notes where forward and backward pass. Column 0 of a sample is the number of its micro-batch."""

    log: list[tuple[int, str, int]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: int) -> torch.Tensor:
        ctx.layer, ctx.microbatch = layer, -1
        if not isinstance(x, torch._subclasses.FakeTensor):
            ctx.microbatch = int(x[0, 0])
            Marked.log.append((layer, "F", ctx.microbatch))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        Marked.log.append((ctx.layer, "B", ctx.microbatch))
        return gradient, None


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(N_STAGES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = Marked.apply(torch.cat([x[:, :1], layer(x)[:, 1:]], 1), number)
        return x


@pytest.mark.parametrize("n_devices", [2, 4])
def test_the_model_sees_the_order_that_is_dumped(n_devices: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Noted by the model itself, each forward (a recomputation, too) and each input gradient. One in two schedules without `--full`."""
    x = torch.randn(COUNT * 2, 4)
    x[:, 0] = torch.arange(COUNT).repeat_interleave(2)
    x.requires_grad_()  # or the first stage would have no I to do
    options = {"n_microbatches": COUNT, "loss_fn": square_loss, "devices": ["cpu"] * n_devices, "schedule": "gpipe"}
    options["check"] = False  # or the model runs once more beside its recording
    unpinned = pc.compile(Noting(), N_STAGES, example_args=(x,), cost="analytic", **options)
    names = [node.name for node in unpinned.graph.graph.nodes if node.name.startswith("Marked")]
    pins = {name: stage for stage, name in enumerate(names)}
    even = pc.compile(Noting(), N_STAGES, example_args=(x,), cost="analytic", pin=pins, **options).plan
    pipe = pc.compile(
        Noting(),
        N_STAGES,
        example_args=(x,),
        plan=even,
        dispatch="inline",
        checkpoint=[False, True, True, False],
        **options,
    )
    marks = [node for node in pipe.graph.graph.nodes if node.name.startswith("Marked")]
    stage_of = {node.args[1]: pipe.plan.stage_of[node.name] for node in marks}
    assert sorted(stage_of.values()) == list(range(N_STAGES))
    pipe.step(x)  # runs operations on random numbers, to find what the loss divides by
    schedules = [schedule for schedule, count in runs() if count == n_devices]
    for schedule in schedules if pytestconfig.getoption("--full") else schedules[::2]:
        pipe.reschedule(schedule)
        Marked.log.clear()
        pipe.step(x)
        pipe.dump(tmp_path)
        dumped = pc.Schedule.from_csv((tmp_path / "schedule.csv").read_text())
        moved = placement_of(dumped)
        for device, row in enumerate(dumped.rows):
            log = [(stage_of[n], kind, m) for n, kind, m in Marked.log]
            seen = [one for one in log if moved.get(one[2], dumped.placement)[one[0]] == device]
            assert seen == [(a.stage, _letter(a), a.microbatch) for a in row if a.kind not in _UNSEEN]


_UNSEEN = (Kind.WEIGHT_GRAD, Kind.OFFLOAD, Kind.RELOAD)


def _letter(action: Action) -> str:
    return "F" if action.kind in (Kind.FORWARD, Kind.RECOMPUTE) else "B"


def test_a_schedule_of_ones_own_and_one_from_a_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    eager, x = copy.deepcopy(model), torch.randn(7, 4)
    mine = pc.Schedule.from_csv("0F0,0F1,2F0,2I0,2F1,0I0,2I1,2W0,0I1,2W1,0W1,0W0\n1F0,1F1,1R0,1B0,1I1,1W1\n")

    def backwards(n_stages: int, n_microbatches: int, n_devices: int) -> pc.Schedule:
        return pc.build_schedule("gpipe", n_stages, n_microbatches, n_devices=n_devices)

    accumulate(eager, x, 2)
    for schedule, n_devices in ((mine, 2), (backwards, 3)):
        model.zero_grad()
        pipe = pc.compile(
            model, 3, loss_fn=square_loss, cost="analytic", schedule=schedule, devices=["cpu"] * n_devices,
            n_microbatches=2,
        )  # fmt: skip
        pipe.step(x)
        assert_same(model, eager)


def test_forward_alone_gives_the_loss_and_no_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    x = torch.randn(7, 4)
    pipe = pc.compile(model, 3, loss_fn=square_loss, cost="analytic", schedule="forward", n_microbatches=3)
    parts = [square_loss(model(part)) * (len(part) / 7) for part in torch.tensor_split(x, 3)]
    torch.testing.assert_close(pipe.step(x), torch.stack(parts).sum())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_devices_by_default_are_as_many_as_the_schedule_wants() -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(8, 4)
    counts = {"1f1b": 4, "zbv": 2, "interleaved": 4}
    for schedule, count in counts.items():
        pipe = pc.compile(model, 4, example_args=(x,), loss_fn=square_loss, cost="analytic", schedule=schedule)
        assert len(pipe.devices) == count
    assert pc.compile(model, 4, schedule="zbv", example_args=(x,), cost="analytic").plan.placement == (0, 1, 1, 0)
