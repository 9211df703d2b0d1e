"""What a newcomer passes for a model, its inputs or its memory: the answer says what to write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc

X = torch.randn(4, 8)
CHAIN = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def compiled(model=CHAIN, x=X, **options):
    return pc.compile(model, 2, devices=["cpu"] * 2, example_args=(x,), n_microbatches=2, cost="analytic", **options)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("resnet18", "pipecompile check torchvision:resnet18"),
        (torch.export.export(CHAIN, (X,)), "an ExportedProgram, not an nn.Module"),
        (torch.export.export(CHAIN, (X,)), "the model that was exported"),
        (nn.ModuleList(CHAIN), r"nn.Sequential\(\*layers\)"),
        (CHAIN.state_dict(), "an OrderedDict"),
    ],
)
def test_a_model_that_is_none(model, words):
    with pytest.raises(pc.InputError, match=words):
        compiled(model)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_input(make):
    with pytest.raises(pc.InputError, match=r"sparse tensor of shape \(4, 8\)[\s\S]*to_dense"):
        compiled(x=make(X))


def test_numbers_of_the_wrong_kind_for_an_embedding():
    words = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
    with pytest.raises(pc.TraceError, match=r"x\.long\(\); on the command line[\s\S]*:int64"):
        compiled(words)


@pytest.mark.parametrize(
    ("text", "meant"), [("16GiB", "17179869184"), ("2 GB", "2000000000"), ("much", "16 \\* 2\\*\\*30")]
)
def test_a_memory_limit_as_text(text, meant):
    with pytest.raises(pc.InputError, match=f"memory_limit={meant}"):
        compiled(memory_limit=text)
