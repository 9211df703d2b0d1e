"""A module that acts as another: names, values and modes are those of the model, and only its place is fixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.driver.model_proxy import ModelProxy, check_norms
from pipecompile.errors import InputError


class Proxy(ModelProxy):
    forgotten = 0

    def _forget(self) -> None:
        self.forgotten += 1

    def _place_names(self) -> str:
        return "stage 0: cpu"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_names_are_those_of_the_model_without_a_prefix() -> None:
    inner = model()
    proxy = Proxy(inner)
    assert list(proxy.state_dict()) == list(inner.state_dict())
    assert dict(proxy.named_parameters()) == dict(inner.named_parameters())
    assert [name for name, _ in proxy.named_buffers()] == [name for name, _ in inner.named_buffers()]
    assert [*proxy.named_modules()] == [*inner.named_modules()]
    assert [*proxy.named_children()] == [*inner.named_children()]
    assert [name for name, _ in nn.Sequential(proxy).named_parameters()] == [f"0.{name}" for name, _ in inner.named_parameters()]  # fmt: skip


def test_modes_and_functions_go_to_every_module_of_the_model() -> None:
    inner, seen = model().eval(), []
    proxy = Proxy(inner)
    assert not proxy.training
    assert proxy.train() is proxy
    assert all(module.training for module in (proxy, *inner.modules()))
    assert not any(module.training for module in (proxy.eval(), *inner.modules()))
    assert proxy.apply(seen.append) is proxy
    assert seen == [inner[0], inner[1], inner]


def test_without_copies_no_sync_changes_nothing() -> None:
    proxy = Proxy(model())
    with proxy.no_sync():
        proxy.model(torch.ones(2, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in proxy.parameters())


def test_a_loaded_state_is_in_the_models_own_tensors() -> None:
    inner = model()
    proxy, weight = Proxy(inner), inner[0].weight
    state = {name: value + 1 for name, value in inner.state_dict().items()}
    assert str(proxy.load_state_dict(state)) == "<All keys matched successfully>"
    assert inner[0].weight is weight
    assert torch.equal(weight, state["0.weight"])
    with pytest.raises(RuntimeError, match="Missing key"):
        proxy.load_state_dict({})
    assert proxy.load_state_dict({}, strict=False).missing_keys[:2] == ["0.weight", "0.bias"]
    assert proxy.forgotten == 0


def test_assigned_and_converted_tensors_drop_what_depends_on_the_old() -> None:
    inner = model()
    proxy = Proxy(inner)
    proxy.load_state_dict({name: value.clone() for name, value in inner.state_dict().items()}, assign=True)
    assert proxy.forgotten == 1
    assert proxy.to(torch.float64) is proxy
    assert (inner[0].weight.dtype, proxy.forgotten) == (torch.float64, 2)
    proxy.float()
    assert (inner[0].weight.dtype, proxy.forgotten) == (torch.float32, 3)


@pytest.mark.parametrize(
    "move",
    [lambda p: p.to("meta"), lambda p: p.to(device="meta", dtype=torch.float64), lambda p: p.to(torch.ones(1, device="meta")),
     lambda p: p.cuda(), lambda p: p.cuda(0), lambda p: p.to_empty(device="meta"), lambda p: nn.Sequential(p).to("meta"),
     lambda p: nn.Sequential(nn.ReLU(), p).to_empty(device="meta")],
)  # fmt: skip
def test_a_device_is_refused_with_the_places_of_the_stages(move: Any) -> None:
    proxy = Proxy(model())
    with pytest.raises(InputError, match="cannot be moved to a device") as caught:
        move(proxy)
    assert caught.value.where == "stage 0: cpu"
    assert proxy.forgotten == 0


@pytest.mark.parametrize(
    "stay",
    [lambda p: p.to("cpu"), lambda p: p.to(torch.ones(1)), lambda p: p.cpu(), lambda p: p.to(torch.float32), lambda p: p.float(),
     lambda p: nn.Sequential(p).to("cpu", torch.float32), lambda p: nn.Sequential(p).cpu(), lambda p: p.to()],
)  # fmt: skip
def test_to_where_everything_is_does_nothing(stay: Any) -> None:
    proxy = Proxy(model())
    weight = proxy.model[0].weight
    pointer = weight.data_ptr()
    stay(proxy)
    assert proxy.forgotten == 0
    assert proxy.model[0].weight is weight
    assert weight.data_ptr() == pointer


def test_a_parent_changes_the_dtype_as_the_pipeline_itself() -> None:
    proxy = Proxy(model())
    nn.Sequential(nn.Linear(2, 2), proxy).double()
    assert (proxy.model[0].weight.dtype, proxy.forgotten) == (torch.float64, 1)


def test_without_a_pipeline_there_is_nothing_to_drop_and_no_place() -> None:
    proxy = ModelProxy(model())
    assert proxy._place_names() == ""
    assert proxy.double() is proxy


class Configured(nn.Module):
    """Has what models of transformers have: settings, methods that use the weights, private marks."""

    _marks = ("head",)

    def __init__(self) -> None:
        super().__init__()
        self.config, self.fc = {"size": 2}, nn.Linear(2, 2)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + len(self.config)

    @property
    def scores(self) -> torch.Tensor:
        raise AttributeError("generate first")


def test_attributes_and_methods_of_the_model_are_reached() -> None:
    inner = Configured()
    proxy, x = Proxy(inner), torch.ones(1, 2)
    assert proxy.config is inner.config
    assert proxy.fc is inner.fc
    assert proxy._marks == ("head",)
    assert torch.equal(proxy.generate(x), inner.fc(x) + 1)
    assert not hasattr(proxy, "__rich__")
    with pytest.raises(AttributeError, match="neither Proxy nor its model, Configured, has the attribute 'head'"):
        _ = proxy.head
    with pytest.raises(AttributeError, match="'Configured' object has no attribute 'scores'"):
        _ = proxy.scores


def test_what_the_model_has_is_set_on_the_model_and_the_rest_on_the_object() -> None:
    inner, layer = Configured(), nn.Linear(2, 3)
    proxy = Proxy(inner)
    proxy.fc, proxy.config, proxy.extra = layer, {}, nn.ReLU()
    assert inner.fc is layer
    assert inner.config == {}
    assert isinstance(inner.extra, nn.ReLU)
    assert dict(proxy.named_children()) == {"fc": layer, "extra": inner.extra}
    inner._last, inner.forgotten = "model", "model"
    proxy._last, proxy.forgotten, proxy.note = "proxy", 3, "proxy"
    assert (inner._last, inner.forgotten, hasattr(inner, "note")) == ("model", "model", False)
    assert (proxy._last, proxy.forgotten, proxy.note) == ("proxy", 3, "proxy")


def test_an_object_that_is_not_set_up_has_no_attributes_of_a_model() -> None:
    with pytest.raises(AttributeError, match="'Proxy' object has no attribute 'config'"):
        _ = Proxy.__new__(Proxy).config


def test_the_mode_is_that_of_the_model() -> None:
    inner = Configured()
    proxy = Proxy(inner)
    inner.eval()
    assert not proxy.training
    proxy.training = True
    assert inner.training
    assert not inner.fc.training
    assert not proxy.eval().training
    assert not inner.training


def test_what_is_registered_or_deleted_is_that_of_the_model() -> None:
    inner = Configured()
    proxy = Proxy(inner)
    proxy.register_buffer("mask", torch.ones(2))
    proxy.register_buffer("cache", torch.ones(2), persistent=False)
    proxy.register_parameter("scale", nn.Parameter(torch.ones(1)))
    proxy.register_module("norm", nn.LayerNorm(2))
    assert inner.norm is proxy.norm
    assert {"mask", "scale", "norm.weight"} <= {*proxy.state_dict()}
    assert "cache" not in proxy.state_dict()
    assert "cache" in dict(inner.named_buffers())
    del proxy.scale
    assert "scale" not in inner.state_dict()
    proxy.note = 1
    del proxy.note
    assert not hasattr(proxy, "note")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((None, 2.0, False), "max_norm"), ((1.0, 10**400, False), "norm_type"), ((1.0, 2.0, "yes"), "error_if_nonfinite")],
    ids=["max_norm", "norm_type", "flag"],
)
def test_arguments_of_clipping_are_numbers_and_a_flag(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(InputError, match=f"{name}=.* is not"):
        check_norms(*arguments)
    check_norms(torch.tensor(1.0), "inf", error_if_nonfinite=True)


def test_hooks_are_those_of_the_model() -> None:
    """Hooks of the object itself would run in calls alone, not in steps, and those of a state never."""
    inner = model()
    proxy, seen = Proxy(inner), []
    handle = proxy.register_forward_hook(lambda module, *_: seen.append(module))
    inner(torch.zeros(2, 2))
    handle.remove()
    proxy.register_state_dict_post_hook(lambda _, state, *__: state.update(extra=1))
    proxy.register_load_state_dict_pre_hook(lambda _, state, *__: state.pop("extra"))
    assert seen == [inner]
    assert proxy.state_dict()["extra"] == 1
    assert str(proxy.load_state_dict(proxy.state_dict())) == "<All keys matched successfully>"
    names = [name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("hook")]
    assert all(name in vars(ModelProxy) for name in names)
