"""What two trial runs say about every run; the table in the docstring of the module."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

from pipecompile.tracing.model_pieces import Piece, UnpredictableResult
from pipecompile.tracing.opaque.result_spec import UNKNOWN, are_comparable, infer_result_specs
from pipecompile.tracing.opaque.trial_runs import run_trial

PIECE = Piece("part")


class Part(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


class Whole(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.part = Part(body)

    def forward(self, x):
        return self.part(x)


def test_a_quantized_result_is_refused_with_its_dtype() -> None:
    with pytest.raises(UnpredictableResult) as refused:
        spec_of(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), torch.randn(4, 8))
    assert "torch.quint8" in refused.value.why
    assert "in one submodule" in refused.value.hint


def spec_of(body, x):
    parts = x, x[:-1], x[:2]
    runs = [run_trial(Whole(body), (part,), {}, [PIECE])[PIECE] for part in parts]
    return infer_result_specs(PIECE, runs, [len(part) for part in parts])[0]


@pytest.mark.parametrize(
    "body, shape",
    [
        (lambda x: x, (Fraction(1), 8)),
        (lambda x: x.repeat(5, 1)[:, 0], (Fraction(5),)),
        (lambda x: x.reshape(-1, 2, 2).transpose(0, 1), (UNKNOWN, Fraction(2), 2)),
        (lambda x: x[x[:, 0] > -10], (UNKNOWN, 8)),
        (lambda x: x.new_zeros(7, 3), (UNKNOWN, 3)),
        (lambda x: x.sum(), ()),
    ],
)
def test_sizes(body, shape):
    x = torch.arange(32.0).view(4, 8) - torch.tensor([40.0, 0, 90, 0])[:, None]
    (leaf,) = spec_of(body, x).leaves
    assert leaf.shape == shape


def test_plain_values_must_not_depend_on_the_data():
    x = torch.arange(32.0).view(4, 8)
    made = spec_of(lambda x: (3, "a", None, x.shape[1], float("nan")), x)
    assert [leaf.value for leaf in made.leaves[:4]] == [3, "a", None, 8]
    wrong = (float, lambda x: len(x) * 2 + 1, lambda x: bool(x.any()), lambda x: x.numpy(), lambda x: object())
    for body in (lambda x: wrong[0](x.sum()), *wrong[1:]):
        with pytest.raises(UnpredictableResult):
            spec_of(body, x)


def test_structures_are_compared():
    x = torch.zeros(4, 8)
    runs = [run_trial(Whole(list), (part,), {}, [PIECE]) for part in (x, x, x[:-1])]
    assert are_comparable(runs[0], runs[1])
    assert not are_comparable(runs[0], runs[2])
