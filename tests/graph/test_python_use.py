"""The names that hooks and pieces kept whole read, set and change, and the objects that they share."""

from __future__ import annotations

from functools import partial

import pytest
from sympy import Symbol
from torch import nn

from pipecompile.graph.python_use import python_use
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.opaque_module import OpaqueModule


class Tally:
    """An object that a hook and a piece share."""

    def __init__(self) -> None:
        self.level, self.rows = 0.0, {"a": 1.0}

    def note(self, value: float) -> None:
        self.level = value


def test_uses_are_found_through_objects_methods_and_partials() -> None:
    tally, model = Tally(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda _layer, _inputs, output: tally.note(float(output.sum())))
    model[1].register_forward_hook(partial(_scaled_by, tally))
    model[2].register_forward_hook(lambda _layer, _inputs, output: output * tally.rows["a"])
    writer, reader, other = (python_use(layer) for layer in model)
    assert writer is not None
    assert reader is not None
    assert other is not None
    assert writer.bound == {"level"}
    assert "level" in reader.read
    assert reader.shares_object(writer, "level")
    assert "level" not in other.read


def _scaled_by(tally, _layer, _inputs, output):
    return output * tally.level


def test_a_layer_without_hooks_uses_nothing() -> None:
    assert python_use(nn.Linear(2, 2)) is None


def test_experts_of_layers_do_not_share_a_stage() -> None:
    """Their code names a library, in which much is set and read."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=8, num_local_experts=2,
    )  # fmt: skip
    layers = transformers.AutoModel.from_config(config).layers
    first, second = (python_use(OpaqueModule(Piece(str(n)), layers[n].mlp.experts, Symbol("s"))) for n in range(2))
    assert first is not None
    assert second is not None
    assert not first.read & (second.bound | second.changed)
    assert {"MixtralExperts"} <= {one.__qualname__.partition(".")[0] for one in first.functions}
