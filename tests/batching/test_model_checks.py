from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.model_checks import validate_model
from pipecompile.errors import InputError


def test_only_modules_with_shapes_are_models() -> None:
    model = nn.Linear(2, 2)
    assert validate_model(model) is model
    with pytest.raises(InputError, match="parameters without a shape"):
        validate_model(nn.LazyLinear(2))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda x: x, "wrap the function"),
        (nn.Linear, r"compile\(Linear\(\.\.\.\), \.\.\.\)"),
        ([nn.Linear(2, 2)], r"nn\.Sequential\(\*layers\)"),
        ({"weight": torch.zeros(1)}, "load_state_dict"),
    ],
)
def test_what_is_no_model_says_what_to_write(value: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"(?s)is a .*, not an nn.Module.*{words}"):
        validate_model(value)


def test_a_wrapped_model_and_a_pipeline_are_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)wrapped in DataParallel.*model\.module"):
        validate_model(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(InputError, match=r"(?s)is a Pipeline already.*pipe\.model"):
        pc.compile(pc.compile(nn.Linear(2, 2), 1), 1)


class Waits(nn.Linear):
    async def forward(self, x):
        return super().forward(x)


class Yields(nn.Linear):
    def forward(self, x):
        yield super().forward(x)


@pytest.mark.parametrize(("model", "words"), [(Waits, "`async def`"), (Yields, "a generator")])
def test_a_forward_that_computes_nothing_when_it_is_called_is_refused(model: type[nn.Module], words: str) -> None:
    with pytest.raises(InputError, match=rf"(?s)forward of {model.__name__} is {words}.*test_model_checks.py:\d+"):
        pc.compile(model(2, 2), 1, example_args=(torch.ones(4, 2),))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_scripted_module_that_sets_attributes_is_refused_with_its_name() -> None:
    """A recording left tensors without values in it, and its counter was not advanced."""
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(Counts()))
    with pytest.raises(InputError, match="the scripted module '1' sets the attribute 'calls'"):
        validate_model(model)
    plain = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.BatchNorm1d(2)))
    assert validate_model(plain) is plain
