"""Random numbers on devices that each have a generator: draws come in the order of the device's launches, whatever streams do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipecompile.driver.backend import Backend
from pipecompile.graph import backward_split as divided
from tests.runtime.test_stream_events import COUNT, outcome, piped
from tests.support.eager import square_loss
from tests.support.emulated import EmulatedExecutable
from tests.support.stepped import SteppedStreams, own_generator


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.4))


def eager_loop(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """The plain loop over micro-batches; block d draws from the generator of device d."""
    states: dict[int, torch.Tensor] = {}
    losses = []
    for part in x.chunk(COUNT):
        h = part
        for device, layer in enumerate(model):
            with own_generator(states, device):
                h = layer(h)
        losses.append(square_loss(h))
        (losses[-1] / COUNT).backward()
    return [torch.stack(losses).mean(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "dispatch"),
    [("1f1b", "always", "inline"), ("gpipe", "except_last", "threads"), ("zb-h2", "never", "inline")],
)
def test_draws_are_those_of_a_loop_with_a_generator_per_device(
    schedule: str, checkpoint: str, dispatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recomputation draws what its forward drew, from the generator of its device, and gives the generator back as it was."""
    monkeypatch.setitem(divided.MIN_WEIGHT_FLOPS, "cpu", 0.0)
    monkeypatch.setattr(Backend, "memories", lambda _, devices, placement: range(len(devices)))
    torch.manual_seed(0)
    model, x = nn.Sequential(*(block() for _ in range(4))), torch.randn(8, 8)
    expected = eager_loop(copy.deepcopy(model), x)
    pipe = piped(model, x, schedule=schedule, checkpoint=checkpoint, dispatch=dispatch)
    assert [stage.first[0] for stage in pipe.plan.stages] == ["0", "1", "2", "3"]
    streams = SteppedStreams()
    EmulatedExecutable(pipe, COUNT, streams=streams)
    for seed in range(6):
        streams.reseed(seed)
        streams.generators = {}
        for mine, theirs in zip(outcome(pipe, x), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
