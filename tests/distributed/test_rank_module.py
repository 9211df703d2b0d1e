"""The model of a pipeline as one rank has it, on a mesh of one rank. uneven.py averages weights on several."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import InputError, RunError
from tests.distributed.test_rank_pipeline import SAMPLES, compiled

pytestmark = pytest.mark.usefixtures("single_rank")


class Square(nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()


def test_a_copy_has_a_model_of_its_own_on_the_same_ranks_with_the_same_cut() -> None:
    pipe = compiled(nn.Linear(4, 4), loss_fn=Square())
    other = copy.deepcopy(pipe)
    assert [name for name, _ in other.named_parameters()] == ["weight", "bias"]
    expected = pipe.step(SAMPLES)
    with torch.no_grad():
        pipe.model.weight.zero_()
    assert torch.equal(other.step(SAMPLES), expected)
    assert other.plan is pipe.plan


def test_a_call_ends_when_the_collectives_that_streams_wait_for_are_over() -> None:
    """On GPUs a rank that is lost would be noticed by nobody: the script would wait for its GPU for ever."""
    pipe = compiled(nn.Linear(4, 4), loss_fn=Square())
    pipe.step(SAMPLES)
    use, lost = pipe._communicator.groups, RankLost(FailureReport(0, "it was killed"), is_posted=False)

    def wait() -> None:
        raise lost

    use.launched(use.ranks.group, wait)
    with pytest.raises(RunError, match=r"rank 0 failed.*it was killed"):
        pipe.step(SAMPLES)


def test_weights_are_averaged_over_steps() -> None:
    pipe = compiled(nn.Linear(4, 4), loss_fn=Square())
    average = torch.optim.swa_utils.AveragedModel(pipe)
    before: Any = pipe.model.weight.detach().clone()
    for added in (1.0, 3.0):
        with torch.no_grad():
            pipe.model.weight.copy_(before + added)
        average.update_parameters(pipe)
    torch.testing.assert_close(average.module.full_state_dict()["weight"], before + 2.0)


def test_layers_and_methods_of_the_model_are_not_reached_on_several_ranks() -> None:
    model = nn.Linear(4, 4)
    pipe = compiled(model, loss_fn=Square())
    assert pipe.weight is model.weight
    with patch.object(RankMesh, "size", 2):
        assert pipe.in_features == 4
        for name in ("weight", "reset_parameters"):
            with pytest.raises(AttributeError, match=f"'{name}' of the model is not reached .* 2 ranks"):
                getattr(pipe, name)
        with pytest.raises(AttributeError, match="'extra' of the model is not reached"):
            pipe.extra = nn.Linear(1, 1)


def test_a_pipeline_on_several_ranks_is_not_pickled() -> None:
    pipe = compiled(nn.Linear(4, 4), loss_fn=Square())
    assert pickle.loads(pickle.dumps(pipe)).step(SAMPLES) == pipe.step(SAMPLES)
    with patch.object(RankMesh, "size", 2), pytest.raises(InputError, match="on several ranks cannot be pickled"):
        pickle.dumps(pipe)


class HeadAlone(nn.Sequential):
    """Gives an optimizer the last layer alone."""

    def parameters(self, recurse: bool = True) -> Any:
        return self[-1].parameters(recurse)


def test_parameters_are_those_that_the_model_names_and_this_rank_has() -> None:
    model = HeadAlone(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = compiled(model, loss_fn=Square())
    assert [*pipe.parameters()] == [model[1].weight, model[1].bias]
    with patch.object(type(pipe), "_is_here", lambda _, one: one is model[1].bias):
        assert [*pipe.parameters()] == [model[1].bias]
