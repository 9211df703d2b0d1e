"""A piece kept whole that writes what no trial run wrote is refused."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.opaque.watched_state import WatchedState


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("top", torch.ones(()))


class Model(nn.Module):
    """It writes a buffer of a layer in a list, whose number it counts out, if the data are large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        for number in range(3):
            if x.abs().max() > 99:
                self.layers[number].top.mul_(0.5)
            h = h * self.layers[number].top
        return self.outer(h)


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_a_write_that_was_not_recorded_is_told(checkpoint: str, dispatch: str) -> None:
    x, y = torch.rand(4, 4), torch.randn(4, 2)
    pipe = pc.compile(
        Model(), 2, n_microbatches=2, loss_fn=mean, checkpoint=checkpoint, dispatch=dispatch, cost="analytic"
    )
    pipe.step(x, target=y)
    with pytest.raises(pc.PipecompileError, match=r"has written layers\.0\.top, which it did not while recording"):
        pipe.step(100 + x, target=y)


def test_weights_that_another_thread_trains_do_not_count_in_a_thread() -> None:
    weight, buffer = nn.Parameter(torch.zeros(1)), torch.zeros(1)
    watched = WatchedState(("weight", "buffer"), (weight, buffer))
    versions, found = watched.versions(), []
    assert not watched.written_since(versions)
    with torch.no_grad():
        weight.add_(1)
    assert watched.written_since(versions) == "weight"
    thread = Thread(target=lambda: found.append(watched.written_since(versions)))
    thread.start()
    thread.join()
    assert found == [""]
    buffer.add_(1)
    thread = Thread(target=lambda: found.append(watched.written_since(versions)))
    thread.start()
    thread.join()
    assert found == ["", "buffer"]
