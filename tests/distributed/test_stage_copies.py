from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.distributed import stage_copies
from pipecompile.distributed.stage_copies import check_loss, check_placed, check_stateless
from pipecompile.errors import InputError, ScheduleError
from pipecompile.runtime.cells.side_effects import SideEffects

STATES: dict[str, tuple[dict[str, Any], str]] = {
    "buffers": ({"written_buffers": (torch.zeros(1),)}, "its forward writes buffers"),
    "python": ({"runs_python": True}, "its forward runs hooks or layers that are kept whole"),
    "flags": ({"flagged": (torch.zeros(1),)}, "its forward leaves values on objects"),
}


@pytest.mark.parametrize("state", STATES)
def test_a_stage_with_state_is_refused(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, text = STATES[state]
    monkeypatch.setattr(stage_copies, "SideEffects", SimpleNamespace(of=lambda stage: stage.effects))
    stages: Any = [
        SimpleNamespace(index=0, effects=SideEffects(draws=True)),
        SimpleNamespace(index=1, effects=SideEffects(**fields)),
    ]
    check_stateless(stages[:1], 2)
    with pytest.raises(InputError, match=f"2 copies of stage 1 run on several ranks, and {text}"):
        check_stateless(stages, 2)


def test_a_loss_has_parameters_of_the_model_alone() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    check_loss(None, model, 2)
    check_loss(lambda output, target: (output - target).square().mean() + model.weight.sum(), model, 2)
    with pytest.raises(InputError, match="the loss has parameters of its own, and runs on the 2 ranks"):
        check_loss(lambda output, target: other(output - target).mean(), model, 2)


def test_a_schedule_runs_where_the_parameters_are() -> None:
    check_placed([(0, 1)], [(0, 1), (1, 0)])
    for own in ([(1, 0)], [(0, 1), (1, 0)]):
        with pytest.raises(ScheduleError, match="their parameters are placed for"):
            check_placed(own, [(0, 1)])
