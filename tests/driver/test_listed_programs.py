"""One program serves lists of several recordings, in any order; its routes are those of all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver import listed_programs
from pipecompile.errors import InputError


class Turn(nn.Module):
    """A BatchNorm that runs once more for every two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).mT
        for _ in range(x.shape[1] // 2):
            h = self.norm(h)
        return self.b(h.mT)


def piped(**options: object) -> pc.Pipeline:
    torch.manual_seed(0)
    loss = {"loss_fn": lambda y: y.square().mean(), "n_microbatches": 2, "cost": "analytic", "batch_norm": "each"}
    return pc.compile(Turn(), 2, devices=["cpu"] * 2, **(loss | options))


def of_lengths(*lengths: int) -> list[torch.Tensor]:
    return [torch.randn(3, length, 3) for length in lengths]


def test_a_recording_that_comes_later_joins_the_program() -> None:
    pipe = piped()
    pipe.step(microbatches=of_lengths(2, 3))
    program = pipe.program
    pipe.step(microbatches=of_lengths(3, 2))
    assert pipe.program is program
    pipe.step(microbatches=of_lengths(3, 3))
    assert pipe.program is not program  # a program of one recording


def test_programs_go_with_the_recordings_and_the_schedule() -> None:
    pipe = piped()
    pipe.step(microbatches=of_lengths(2, 4))
    kept = pipe._cache.listed._kept
    assert len(kept) == 1
    pipe.reschedule("gpipe").step(microbatches=of_lengths(2, 4))
    assert pipe.program.n_microbatches == 2
    assert len(kept) == 1


def test_few_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed_programs, "_KEPT", 2)
    pipe = piped()
    for count in (1, 2, 3):
        pipe.step(microbatches=of_lengths(*[2, 4] * count))
    assert len(pipe._cache.listed._kept) == 2


def test_a_deferred_layer_that_runs_differently_often_is_refused() -> None:
    pipe = piped(batch_norm="deferred")
    with pytest.raises(InputError, match=r"runs \d times in one micro-batch and \d times in another"):
        pipe.step(microbatches=of_lengths(2, 4))
    assert pipe.step(microbatches=of_lengths(2, 2)).isfinite()
