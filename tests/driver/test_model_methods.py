"""Methods of `nn.Module` that a model replaces are the model's through a pipeline too."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipecompile as pc
from pipecompile.driver.model_methods import ModelMethods, overrides
from pipecompile.driver.model_proxy import ModelProxy
from pipecompile.errors import InputError


class Layers(nn.Module):
    """A body with dropout, and a head."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.head = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y * self.scale


class HeadAlone(Layers):
    """Does everything with the head alone."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return self.head.buffers(recurse)

    def eval(self) -> Self:
        self.head.eval()
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.head.zero_grad(set_to_none)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.head.requires_grad_(requires_grad)
        return self

    def double(self) -> Self:
        self.head.double()
        self.scale = self.scale.double()
        return self


def pipeline(model: nn.Module) -> pc.Pipeline:
    return pc.compile(model, 2, cost="analytic", loss_fn=F.cross_entropy, n_microbatches=1)


def public_methods() -> list[str]:
    functions = inspect.getmembers(nn.Module, inspect.isfunction)
    return [name for name, _ in functions if not name.startswith("_")]


LEFT_TO_TORCH = {"forward", "compile", "extra_repr", "ipu", "mtia", "xpu"}
"""A pipeline has its own forward and text, `compile` is refused, and other accelerators are moved to by `to`."""


@pytest.mark.parametrize("name", sorted({*public_methods()} - LEFT_TO_TORCH))
def test_each_public_method_of_a_module_reaches_the_models_version(name: str) -> None:
    class Noted(Exception):
        pass

    def noted(self: nn.Module, *_: Any, **__: Any) -> None:
        raise Noted

    model = type("Own", (Layers,), {})()
    setattr(type(model), name, noted)
    proxy = ModelProxy(model)
    arguments: dict[str, tuple[Any, ...]] = {"cuda": (), "to": ("any", "arguments")}
    given = arguments.get(name, ("scale",) * (len(inspect.signature(getattr(nn.Module, name)).parameters) - 1))
    with pytest.raises(InputError if name == "cuda" else Noted):
        list(getattr(proxy, name)(*given))


def test_a_method_set_on_the_object_is_its_own() -> None:
    model = Layers()
    assert not overrides(model, "eval")
    model.eval = lambda: model  # type: ignore[method-assign]
    assert overrides(model, "eval")
    assert ModelProxy(model).eval().training


CHANGES: dict[str, Callable[[Any], Any]] = {
    "eval": lambda one: one.eval(),
    "requires_grad_": lambda one: one.requires_grad_(False),
    "double": lambda one: one.double(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_after_a_change_by_the_models_own_version_equals_eager(name: str) -> None:
    model = HeadAlone() if name != "double" else HeadInDouble()
    eager, pipe = copy.deepcopy(model), pipeline(model)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    for change in (lambda _: None, CHANGES[name]):
        change(eager)
        assert change(pipe) in (None, pipe)
        torch.manual_seed(1)
        expected = F.cross_entropy(eager(x), y)
        expected.backward()  # type: ignore[no-untyped-call]
        torch.manual_seed(1)
        assert torch.equal(pipe.step(x, target=y), expected)
        for mine, other in zip(nn.Module.parameters(model), nn.Module.parameters(eager), strict=True):
            assert mine.dtype == other.dtype
            if mine.grad is None or other.grad is None:
                assert mine.grad is other.grad
            else:
                assert torch.equal(mine.grad, other.grad)


class HeadInDouble(HeadAlone):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x).to(self.head.weight.dtype))
        return y * self.scale


def test_an_optimizer_gets_the_parameters_that_the_model_names() -> None:
    model = HeadAlone()
    pipe = pipeline(model)
    assert [*pipe.parameters()] == [*model.head.parameters()]
    assert [*pipe.buffers()] == []
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    pipe.step(x, target=y)
    assert pipe.zero_grad() is None
    assert model.head.weight.grad is None
    assert model.body[0].weight.grad is not None


def test_a_move_by_the_models_own_version_is_refused() -> None:
    class Moved(Layers):
        def half(self) -> Self:
            return nn.Module.to(self, "meta")

    with pytest.raises(InputError, match="cannot be moved to a device"):
        pipeline(Moved()).half()


def test_methods_keep_the_names_and_texts_of_torch() -> None:
    assert (ModelMethods.eval.__name__, ModelMethods.eval.__doc__) == ("eval", nn.Module.eval.__doc__)
