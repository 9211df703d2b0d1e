"""Random models with state, in one thread and in several: loss, gradients and state are those of the plain loop."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.system.stateful_parts import PARTS, AuxiliaryLoss, CountingLoss, Hooked, Net, is_near, state_of

pytestmark = pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")


def _slowed(net: Net, draw: random.Random) -> None:
    """Let some layers of a model take a while, so that threads meet in other orders."""
    for part in net.parts:
        if draw.random() < 0.4:
            seconds = draw.random() * 0.003
            part.layer.register_forward_hook(lambda *_, seconds=seconds: time.sleep(seconds))


def _twin(net: Net) -> Net:
    """Return a copy whose hooks count for itself."""
    twin = copy.deepcopy(net)
    for part in twin.parts:
        if isinstance(part, Hooked):
            part.set_up()
    return twin


def _options(draw: random.Random) -> dict[str, Any]:
    schedule = draw.choice(["gpipe", "1f1b", "1f1b", "zb-h1", "zbv", "interleaved"])
    options = {
        "n_stages": draw.choice([2, 3, 4]),
        "n_microbatches": draw.choice([2, 3, 4, 6]),
        "schedule": schedule,
        "checkpoint": draw.choice(["never", "always", "except_last"]),
    }
    return options | ({"n_stages": 4, "devices": ["cpu"] * 2} if schedule in ("zbv", "interleaved") else {})


def _changed(net: Net, draw: random.Random) -> None:
    """Change the model as a user does between two steps."""
    layer = net.parts[draw.randrange(len(net.parts))].layer
    kind = draw.choice(["nothing", "nothing", "frozen", "hook", "step"])
    if kind == "frozen":
        layer.weight.requires_grad_(requires_grad=not layer.weight.requires_grad)
    elif kind == "hook" and layer.weight.requires_grad:
        layer.weight.register_hook(lambda gradient: gradient * 0.9)
    elif kind == "step":
        torch.optim.SGD(net.parameters(), 0.05).step()
        net.zero_grad()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("seed", range(30))
def test_steps_are_those_of_the_loop(seed: int, dispatch: str) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    parts = [draw.choice(PARTS) for _ in range(draw.randint(3, 6))]
    net = Net(parts, {place for place in range(len(parts)) if draw.random() < 0.3}).double()
    twin, make = _twin(net), draw.choice([None, CountingLoss, AuxiliaryLoss, AuxiliaryLoss])
    loss_fn, eager = (F.cross_entropy if make is None else _double(make(one)) for one in (net, twin))
    _slowed(net, draw)
    options = _options(draw)
    n_microbatches, samples = options["n_microbatches"], 2 * options["n_microbatches"] + draw.choice([0, 1])
    pipe = pc.compile(net, loss_fn=loss_fn, cost="analytic", dispatch=dispatch, **options)
    for step in range(3):
        x, target = torch.randn(samples, 6, dtype=torch.float64), torch.randint(3, (samples,))
        expected = 0.0
        for part, its_target in zip(x.tensor_split(n_microbatches), target.tensor_split(n_microbatches), strict=True):
            loss = eager(twin(part), its_target) * (len(part) / samples)
            loss.backward()
            expected += loss.item()
        assert pipe.step(x, target=target).item() == pytest.approx(expected, rel=1e-8)
        for own, other in zip(net.parameters(), twin.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None)
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-7, atol=1e-9)
        assert is_near([state_of(net), state_of(loss_fn)], [state_of(twin), state_of(eager)])
        for one in (net, twin):
            _changed(one, random.Random(seed * 10 + step))


def _double(loss: Any) -> Any:
    return loss.double() if isinstance(loss, nn.Module) else loss
