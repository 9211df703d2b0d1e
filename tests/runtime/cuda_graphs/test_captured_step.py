"""A captured step has the numbers of eager, whatever a user does with gradients, inputs and results between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.graph import backward_split as divided
from pipecompile.runtime.cuda_graphs import captured_step
from pipecompile.runtime.cuda_graphs.step_gradients import StepGradients
from pipecompile.runtime.cuda_graphs.step_graphs import StepGraphs
from pipecompile.schedules import CATALOGUE
from tests.support.eager import accumulate
from tests.support.emulated_capture import EmulatedCaptures
from tests.support.graphed_steps import both, compiled, data, equal, net, told, trained


def schedules() -> list[tuple[str, int]]:
    """Schedules that train without copies to the host, each with the devices on which it puts four stages."""
    found = []
    for name, builder in CATALOGUE.items():
        is_looped = name.startswith("interleaved") or not builder.compared
        if not builder.has_slices and name != "forward" and not name.startswith("po-"):
            found.append((name, 4 // builder.chunks if builder.chunks else 2 if is_looped else 4))
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("n_devices", sorted({n for _, n in schedules()}))
def test_each_schedule_has_the_numbers_of_eager(
    captures: EmulatedCaptures, n_devices: int, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps on other data: the first uncaptured, the second captured, the third replayed, and added to the gradients before."""
    monkeypatch.setitem(divided.MIN_WEIGHT_FLOPS, "cpu", 0.0)
    start = net(nn.BatchNorm1d(8), nn.ReLU())
    expected = copy.deepcopy(start)
    losses = []
    for step in range(3):
        x, target = data(step, 9)
        losses.append(accumulate(expected, x, 4, F.cross_entropy, target))
        if step == 0:
            expected.zero_grad()
    for name in [name for name, n in schedules() if n == n_devices]:
        model = copy.deepcopy(start)
        captures.captured = captures.replayed = 0
        pipe = compiled(model, 4, schedule=name, devices=["cpu"] * n_devices, checkpoint=checkpoint)
        found = []
        with told():
            for step in range(3):
                found.append(pipe.step(data(step, 9)[0], target=data(step, 9)[1]))
                if step == 0:
                    pipe.zero_grad()
        torch.testing.assert_close(found, losses)
        assert equal([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()]), name  # type: ignore[misc]
        assert equal(list(model.buffers()), list(expected.buffers())), name
        assert (captures.captured, captures.replayed) == (2, 2), name


@pytest.mark.smoke
def test_a_step_is_one_launch_from_the_second_on(captures: EmulatedCaptures) -> None:
    pipe = compiled(net(), schedule="1f1b")
    counts = []
    for step in range(5):
        pipe.zero_grad()
        pipe.step(data(step)[0], target=data(step)[1])
        counts.append((captures.captured, captures.replayed))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    pipe.step(data(5)[0], target=data(5)[1])  # adds to the gradients that are there
    assert (captures.captured, captures.replayed) == (2, 5)
    assert pipe.measured is None


def test_gradients_that_are_kept_moved_or_zeroed(captures: EmulatedCaptures) -> None:
    def change(pipe: pc.Pipeline, step: int) -> None:
        first, second, *_ = pipe.parameters()
        if step == 3:
            first.grad = torch.full_like(first, 0.5)
        if step == 4:
            second.grad = None
        if step == 5:
            pipe.zero_grad(set_to_none=False)

    graphs, plain = both(net())
    assert equal(trained(graphs, 7, change), trained(plain, 7, change))
    assert captures.replayed == 6


def test_gradients_of_inputs_and_what_the_loss_returns_beside_it(captures: EmulatedCaptures) -> None:
    def loss_fn(made: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return F.cross_entropy(made, target), {"top": made.argmax(1), "kind": "softmax"}

    found = []
    for pipe in both(net(), loss_fn=loss_fn, has_aux=True):
        own: list[Any] = []
        for step in range(4):
            x = data(step)[0].requires_grad_()
            loss, aux = pipe.step(x, target=data(step)[1])
            own += [loss, x.grad, *(part["top"] for part in aux)]
            assert {part["kind"] for part in aux} == {"softmax"}
        found.append(own)
    assert equal(*found)
    assert captures.replayed == 3


class Scaled(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, made: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(made, target) * self.scale


def test_weights_of_the_loss_get_gradients_and_may_move(captures: EmulatedCaptures) -> None:
    found = []
    for graphs in ("step", False):
        loss = Scaled()
        pipe, own = compiled(net(), loss_fn=loss, cuda_graphs=graphs), list[Tensor]()
        for step in range(6):
            if step == 3:
                loss.scale.data = loss.scale.data + 1
            own.append(pipe.step(data(step)[0], target=data(step)[1]))
            own.append(loss.scale.grad.clone())  # type: ignore[union-attr]
        found.append(own)
    assert equal(*found)
    assert captures.replayed == 4


def test_evaluation_and_steps_without_gradients(captures: EmulatedCaptures) -> None:
    found = []
    for pipe in both(net(nn.Dropout(0.5))):
        pipe.eval()
        own: list[Tensor] = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                own += [pipe(data(step)[0]) for step in range(3)]
                own += [pipe.step(data(step)[0], target=data(step)[1]) for step in range(3)]
        found.append(own)
    assert equal(*found)
    assert captures.captured == 4  # modes, calls and steps
    assert captures.replayed == 8


def test_a_scaler_and_autocast(captures: EmulatedCaptures) -> None:
    found = []
    for pipe in both(net()):
        scaler, own = torch.amp.GradScaler("cpu", init_scale=8.0), list[Tensor]()
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                own.append(pipe.step(data(step)[0], target=data(step)[1], scaler=scaler))
            if step == 2:
                scaler.update(4.0)
        found.append([*own, *(p.grad for p in pipe.parameters() if p.grad is not None)])
    assert equal(*found)
    assert captures.replayed == 3


def test_random_draws_are_made_anew(captures: EmulatedCaptures) -> None:
    graphs, plain = both(net(nn.Dropout(0.5)))
    assert equal(trained(graphs), trained(plain))
    assert captures.replayed == 4


def test_inputs_of_other_sizes_share_memory_and_sums(captures: EmulatedCaptures) -> None:
    def stepped(pipe: pc.Pipeline) -> list[Tensor]:
        losses = []
        for step, samples in enumerate((8, 9, 8, 9, 8, 9, 9, 8)):
            losses.append(pipe.step(data(step, samples)[0], target=data(step, samples)[1]))
            if step == 4:
                pipe.zero_grad()
        return [*losses, *(p.grad for p in pipe.parameters() if p.grad is not None)]

    graphs, plain = both(net())
    with told():
        mine = stepped(graphs)
    assert equal(mine, stepped(plain))
    assert captures.captured == 4


def no_inputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured_step, "write_static", lambda *_: None)


def inputs_elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured_step, "static_copy", lambda tensor: tensor.view_as(tensor))


def departures_within(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured_step, "_copies", lambda leaves: leaves)


def sums_unwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured_step, "_write_sums", lambda *_: None)


def gradients_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepGradients, "_add", lambda _self, _weights, replay: replay())


def addresses_unseen(patch: pytest.MonkeyPatch) -> None:
    before = StepGraphs._look_at_memory
    patch.setattr(StepGraphs, "_look_at_memory", lambda self, kind: None if self._captured else before(self, kind))


def trained_with_outputs(pipe: pc.Pipeline) -> list[Tensor]:
    """Other inputs, results that are kept, gradients elsewhere, weights that move."""
    torch.manual_seed(5)
    found: list[Tensor] = []
    for step in range(8):
        if step == 6:
            weight = next(pipe.parameters())
            weight.data = weight.data + 1
        x, target = data(step)
        loss, outputs = pipe.step(x, target=target)
        found += [loss, *outputs, x]
        if step == 3:
            found += [p.grad for p in pipe.parameters() if p.grad is not None]
            pipe.zero_grad()
    return [*found, *(p.grad for p in pipe.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "damage",
    [None, no_inputs, inputs_elsewhere, departures_within, sums_unwritten, gradients_as_they_are, addresses_unseen],
)
def test_a_damaged_step_is_found_out(
    captures: EmulatedCaptures, damage: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss_fn(made: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(made, target), made

    graphs, plain = both(net(), loss_fn=loss_fn, has_aux=True)
    expected = trained_with_outputs(plain)
    if damage is None:
        assert equal(trained_with_outputs(graphs), expected)
        return
    damage(monkeypatch)
    try:
        mine = trained_with_outputs(graphs)
    except AssertionError as error:
        assert "freed" in str(error)  # noqa: PT017 one of two ways to be found out
    else:
        assert not equal(mine, expected)
