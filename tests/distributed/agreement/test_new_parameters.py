"""Parameters that a model was given after it was cut live where their module ran."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.distributed.agreement.new_parameters import home_new_parameters
from pipecompile.parameters.placement import Homes

SCRIPTS = ["changed layers"]


def test_a_new_parameter_lives_with_its_module_or_the_nearest_around_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    options = {"n_microbatches": 2, "pin": {"0.0": 0, "1": 1}, "cost": "analytic", "devices": ["cpu"] * 2}
    pipe = pc.compile(model, 2, example_args=(torch.randn(4, 4),), **options)  # type: ignore[arg-type]
    homes, recording = Homes(), pipe._cache.latest
    known = home_new_parameters(model, homes, recording)
    assert len(known) == 4
    assert home_new_parameters(model, homes, recording) == []
    model[0].append(nn.Linear(4, 4))
    model[1].bias = None
    nn.utils.parametrizations.weight_norm(model[1])
    new = home_new_parameters(model, homes, recording)
    assert [homes.find(parameter) for parameter in new] == [0, 0, 1, 1]


@pytest.mark.timeout(700)
def test_layers_that_all_ranks_replace_train_as_in_one_process(said: dict[str, list[str]]) -> None:
    """A new optimizer had them on the last rank alone: what another stage ran was never updated, or made from old weights, without a word."""
    for text in said["changed layers"]:
        found = eval(text.splitlines()[0].removeprefix("result: "))
        assert {kind: equal for kind, (equal, _) in found.items()} == {
            "block": True, "parametrization": True, "loaded": True, "copied": False,
        }  # fmt: skip
        assert found["block"][1] == found["loaded"][1] == 0
        assert found["copied"][1] == 1
