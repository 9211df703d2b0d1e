"""`explain` tells what was recorded, what is kept whole, what to look out for and what failed, and never raises."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import pipecompile as pc


class Choosy(nn.Module):
    def forward(self, x):
        return x.relu() if x.sum() > 0 else -x


class Model(nn.Module):
    """Something of everything that there is to tell."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.rnn, self.norm, self.drop = nn.GRU(8, 8, batch_first=True), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.choosy, self.unused = Choosy(), nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.norm.register_forward_hook(lambda module, given, made: None)

    def forward(self, tokens):
        y = self.rnn(self.embed(tokens))[0][:, -1]
        self.steps += 1
        if len(tokens) > 2:
            y = y * 2
        return self.head(self.choosy(self.drop(self.norm(y))))


def test_everything_there_is_to_tell():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    found = pc.explain(model, torch.randint(0, 10, (4, 5)))
    assert found.traced
    assert not found.failures
    assert found.report.parameters == sum(p.numel() for n, p in model.named_parameters() if "unused" not in n)
    opaque, rnn = found.kept_whole
    assert (opaque.name, opaque.kind, opaque.code) == ("choosy", "opaque", "PC101")
    assert (opaque.file, opaque.line) == (__file__, Choosy.forward.__code__.co_firstlineno + 1)
    assert opaque.source == "return x.relu() if x.sum() > 0 else -x"
    assert (rnn.name, rnn.kind) == ("rnn", "layer")
    assert len(found.guards) == 1
    assert "batch_size" in found.guards[0]
    assert {risk.kind: risk.count for risk in found.risks} == {
        "batch statistics": 1, "hooks": 1, "tied weights": 1, "randomness": 1, "in-place writes": 1, "unused parameters": 2,
        "kept whole": 1,
    }  # fmt: skip
    text = str(found)
    for word in ("choosy: PC101", opaque.source, "batch_size", "norm", "embed.weight = head.weight", "unused.weight"):
        assert word in text
    assert json.loads(json.dumps(found.to_dict()))["report"]["kept_whole"][0]["code"] == "PC101"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training


def test_evaluation_has_fewer_risks():
    found = pc.explain(Model().eval(), torch.randint(0, 10, (4, 5)))
    assert {risk.kind for risk in found.risks}.isdisjoint({"batch statistics", "randomness"})


class Nasty(nn.Module):
    def __init__(self, error) -> None:
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


X = torch.randn(3, 4)


@pytest.mark.parametrize(
    "model, args, code",
    [
        (len, (X,), "PC109"),
        (None, (), "PC109"),
        (nn.Linear(4, 4), (), "PC108"),
        (nn.Linear(4, 4), (torch.randn(3, 5),), "PC108"),
        (nn.Linear(4, 4), (X, 3, "x"), "PC108"),
        (nn.Linear(4, 4), (torch.randn(0, 4),), "PC109"),
        (nn.Linear(4, 4), ("text",), "PC108"),
        (Nasty(KeyError("who")), (X,), "PC108"),
        (Nasty(Unprintable()), (X,), "PC108"),
        (nn.Module(), (X,), "PC108"),
        (Choosy(), (X,), "PC101"),
    ],
)
def test_it_never_raises(model, args, code):
    found = pc.explain(model, *args)
    assert not found.traced
    assert [failure.code for failure in found.failures] == [code]
    assert code in str(found)
    assert found.kept_whole == found.guards == ()


@pytest.mark.parametrize(
    ("model", "args", "hint"),
    [
        (None, (), "an instance of a subclass of nn.Module"),
        (len, (X,), "wrap the function in an nn.Module"),
        (nn.Linear(4, 4), (torch.randn(0, 4),), "a mini-batch of at least one sample"),
    ],
)
def test_what_is_refused_before_the_recording_is_not_blamed_on_the_batch_dimension(model, args, hint):
    (failure,) = pc.explain(model, *args).failures
    assert hint in failure.hint
    assert "dimension" not in f"{failure.why} {failure.hint}"


def test_who_interrupts_is_heard():
    with pytest.raises(KeyboardInterrupt):
        pc.explain(Nasty(KeyboardInterrupt()), X)
