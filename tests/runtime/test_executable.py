"""A bound program runs any number of times; frames of failed runs are dropped."""

from __future__ import annotations

import pytest
import torch

import pipecompile as pc
from pipecompile.ir import LOSS
from pipecompile.runtime.executable import Executable
from tests.support.hand_cells import PlainCode, arrivals, executable, weights


def run(bound: Executable, x: torch.Tensor) -> list[torch.Tensor]:
    frame = bound.frame((2, 2), arrivals(x.chunk(2)))
    bound.run(bound.inline, frame)
    losses = frame.departures[LOSS, False]
    bound.finished(frame)
    return losses


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_losses_and_gradients_are_those_of_the_function(schedule: str) -> None:
    first, last = weights()
    x = torch.arange(4.0)
    losses = run(executable(first, last, schedule), x)
    assert [loss.item() for loss in losses] == [6 * 0.5, 6 * 2.5]
    assert (first.grad, last.grad) == (torch.tensor(3 * 1.5), torch.tensor(2 * 1.5))


def test_a_frame_serves_again_and_a_failed_one_does_not() -> None:
    bound = executable(*weights())
    run(bound, torch.ones(4))
    frame = bound.frame((2, 2), arrivals(torch.ones(4).chunk(2)))
    bound.finished(frame)
    assert bound.frame((2, 2), {}) is frame
    assert bound.frame((2, 2), {}) is not frame


def test_cells_are_refreshed_before_each_run() -> None:
    bound = executable(*weights())
    run(bound, torch.ones(4))
    run(bound, torch.ones(4))
    assert all(isinstance(cell.code, PlainCode) and cell.code.refreshes == 2 for cell in bound.cells)


def test_the_halves_split_before_the_first_backward_of_each_device() -> None:
    bound = executable(*weights(), "gpipe")
    forward, backward = bound.halves
    names = [
        {str(bound.program.rows[d][i].action) for d, i in half.order if bound.program.rows[d][i].action}
        for half in (forward, backward)
    ]
    assert names == [{"0F0", "0F1", "1F0", "1F1"}, {"0B0", "0B1", "1B0", "1B1"}]
    assert len(forward.order) + len(backward.order) == len(bound.inline.order)


def test_a_failure_names_stage_and_micro_batch() -> None:
    bound = executable(*weights())
    with pytest.raises(pc.RunError, match="stage 0 failed in forward of micro-batch 1") as caught:
        bound.run(bound.inline, bound.frame((1, 1), arrivals([torch.ones(1), "text"])))  # type: ignore[list-item]
    assert (caught.value.stage, caught.value.microbatch) == (0, 1)
    assert isinstance(caught.value.__cause__, TypeError)
