"""`hf:NAME` is a small model of transformers with random weights, and a wrong name has the nearest one."""

from __future__ import annotations

import sys

import pytest
import torch

from pipecompile.cli.transformers_model import transformers_model
from pipecompile.errors import InputError

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["llama", "BertForMaskedLM", "gpt2,n_layer=2,n_embd=32"])
def test_a_model_is_small_and_runs(name):
    model = transformers_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert model(torch.randint(0, 10, (2, 8))).logits.shape[:2] == (2, 8)
    if name.startswith("gpt2"):
        assert (model.config.n_layer, model.config.n_embd) == (2, 32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama", "hf:llama"),
        ("gpt2,n_layr=3", "n_layer="),
        ("gpt2,n_layer", "no entry|no value"),
        ("gpt2,n_layer=x", "hf:gpt2"),
    ],
)
def test_what_is_unknown_is_refused(name, message):
    with pytest.raises(InputError, match=message):
        transformers_model(name)


def test_the_library_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install transformers"):
        transformers_model("llama")
