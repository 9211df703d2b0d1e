"""Reads of attributes are noted while a block runs: of modules, and of the objects that they lead to."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipecompile as pc
from pipecompile.tracing.guards.attribute_reads import AttributeReads
from tests.support.eager import accumulate, assert_same


@dataclass
class Config:
    scale: float = 1.0
    other: float = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.config, self.inner = Config(), [{"c": Config()}]
        self.space = SimpleNamespace(a=1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * self.config.scale * self.inner[0]["c"].other


def test_reads_of_modules_and_objects_are_noted_with_their_line() -> None:
    net = Net()
    with AttributeReads() as notes:
        net(torch.zeros(1, 2))
    assert {"forward", "layer", "config", "inner"} <= notes.reads_of(net).keys()
    assert "space" not in notes.reads_of(net)
    assert list(notes.reads_of(net.config)) == ["scale"]
    assert list(notes.reads_of(net.inner[0]["c"])) == ["other"]
    assert {"weight", "bias"} <= notes.reads_of(net.layer).keys()
    code = Net.forward.__code__
    assert notes.reads_of(net.config)["scale"] == f"{__file__}:{code.co_firstlineno + 1} in Net.forward"


def test_classes_are_as_before_afterwards() -> None:
    class Own(nn.Module):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    own = Own.__dict__["__getattribute__"]
    with AttributeReads([Own(), Config()]) as notes:
        assert "__getattribute__" in vars(nn.Module)
        assert "__getattribute__" in vars(Config)
        assert notes.is_watched(Own())
        assert not notes.is_watched(SimpleNamespace())
    assert "__getattribute__" not in vars(nn.Module)
    assert "__getattribute__" not in vars(Config)
    assert Own.__dict__["__getattribute__"] is own


def test_reads_of_other_threads_and_of_the_table_lookup_are_no_reads() -> None:
    net = Net()
    with AttributeReads() as notes:
        other = Thread(target=lambda: net.space)
        other.start(), other.join()
        assert net.layer is not None
        assert net.__dict__["training"]
    assert set(notes.reads_of(net)) == {"layer", "__dict__"}


def test_inside_a_layer_reads_of_other_objects_are_no_reads() -> None:
    net = Net()
    layer = net.layer
    layer.register_forward_hook(lambda *_: net.space and None)
    with AttributeReads() as notes, notes.of_layer(layer):
        layer(torch.zeros(1, 2))
    assert not notes.reads_of(net)
    assert "weight" in notes.reads_of(layer)


class Sealing(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"cannot set {name}")


class Sealed(metaclass=Sealing):
    pass


def test_a_class_that_refuses_new_attributes_is_no_obstacle() -> None:
    """typing_extensions has such classes, and lightning's modules lead to them: recording ended in a TypeError."""
    with AttributeReads([Sealed()]):
        pass
    assert "__getattribute__" not in vars(Sealed)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x)[0])


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("error::pipecompile.RecordingWarning")
def test_a_recurrent_layer_with_a_normed_weight_is_recorded_once() -> None:
    """Its hook gives it another weight in each call, which the layer notes in lists of its own: the model was recorded anew in every step."""
    torch.manual_seed(0)
    model, eager = Recurrent(), Recurrent()
    eager.load_state_dict(model.state_dict())
    for one in (model, eager):
        torch.nn.utils.weight_norm(one.layer, "weight_hh_l0")
    pipe = pc.compile(model, 2, loss_fn=mse_loss, cost="analytic", devices=["cpu"] * 2, n_microbatches=2)
    for scale in (1.0, 2.0, 3.0, 4.0):
        x, y = scale * torch.randn(4, 3, 4), torch.randn(4, 3, 2)
        if scale == 4.0:
            for one in (model, eager):
                one.layer.weight_ih_l0 = nn.Parameter(torch.full((16, 4), 0.1))
        expected = accumulate(eager, x, 2, mse_loss, y)
        assert torch.equal(pipe.step(x, target=y), expected)
        assert pipe._cache.latest.number == 1 + (scale == 4.0)
    assert_same(model, eager)
