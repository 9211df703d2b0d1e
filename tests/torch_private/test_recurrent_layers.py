"""The lists of weights that recurrent layers keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.torch_private.recurrent_layers import flatten_weights, noted_weights

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_call_with_other_weights_does_not_note_them(kind: type[nn.RNNBase]) -> None:
    layer, x = kind(4, 4), torch.randn(3, 2, 4)
    own, references = dict(layer.named_parameters()), list(layer._flat_weight_refs)
    expected = layer(x)[0]
    for name, weight in own.items():
        setattr(layer, name, nn.Parameter(2 * weight.detach()))
    with noted_weights([layer, nn.Linear(1, 1), layer]):
        flat = layer._flat_weights
        assert not torch.equal(layer(x)[0], expected)
        assert layer._flat_weights is flat, "a call that notes weights has a new list"
    for name, weight in own.items():
        setattr(layer, name, weight)
    assert layer._flat_weight_refs == references
    assert torch.equal(layer(x)[0], expected)


def test_recurrent_layers_are_flattened_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    flattened: list[nn.Module] = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda layer: flattened.append(layer))
    model = nn.ModuleList([nn.LSTM(2, 2), nn.Linear(2, 2), nn.GRU(2, 2)])
    flattened.clear()  # those of the constructors
    flatten_weights([*model.modules(), *model.modules()])
    assert flattened == [model[0], model[2]]
