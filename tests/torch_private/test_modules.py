"""Tables and hooks of modules."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import pipecompile as pc
from pipecompile.torch_private.modules import (
    GLOBAL_FORWARD_HOOKS,
    HOOK_TABLES,
    STATE_TABLES,
    BatchNorm,
    NormBase,
    apply_to_tensors,
    backward_hooks_of,
    backward_hooks_removed,
    buffers_of,
    children_of,
    copy_metadata,
    forward_hooks_of,
    has_any_global_hook,
    hooks_of_torch_removed,
    is_compiled,
    is_hooked,
    modules_in,
    non_persistent_of,
    parameters_of,
    users_hooks,
)

pytestmark = pytest.mark.smoke

Register = Callable[[nn.Module], object]
FORWARD: list[Register] = [
    lambda m: m.register_forward_hook(lambda *_: None),
    lambda m: m.register_forward_pre_hook(lambda *_: None),
]
BACKWARD: list[Register] = [
    lambda m: m.register_full_backward_hook(lambda *_: None),
    lambda m: m.register_full_backward_pre_hook(lambda *_: None),
]


def test_tables_are_those_of_the_module() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.ones(1), persistent=False)
    assert parameters_of(norm) == dict(norm.named_parameters())
    assert buffers_of(norm) == dict(norm.named_buffers())
    assert non_persistent_of(norm) == {"scratch"}
    assert list(children_of(nn.Sequential(norm)).values()) == [norm]
    assert all(name in vars(norm) for name in (*STATE_TABLES, *HOOK_TABLES))


@pytest.mark.parametrize("register", FORWARD)
def test_forward_hooks_are_seen(register: Register) -> None:
    layer = nn.Linear(1, 1)
    assert not is_hooked(layer)
    register(layer)
    assert is_hooked(layer)
    assert any(forward_hooks_of(layer))
    assert not any(backward_hooks_of(layer))


@pytest.mark.parametrize("register", BACKWARD)
def test_backward_hooks_are_seen(register: Register) -> None:
    layer = nn.Linear(1, 1)
    register(layer)
    assert is_hooked(layer)
    assert any(backward_hooks_of(layer))
    assert not any(forward_hooks_of(layer))


def test_global_hooks_are_seen() -> None:
    assert not has_any_global_hook()
    handle = register_module_forward_hook(lambda *_: None)
    assert has_any_global_hook()
    assert any(GLOBAL_FORWARD_HOOKS)
    handle.remove()
    assert not any(GLOBAL_FORWARD_HOOKS)


def test_hooks_that_torch_registers_for_all_modules_are_told_from_the_users() -> None:
    def hook(*_: object) -> None:
        return None

    handle = register_module_forward_hook(hook)
    with FlopCounterMode(display=False):
        before = [dict(table) for table in GLOBAL_FORWARD_HOOKS]
        assert [users_hooks(table) for table in GLOBAL_FORWARD_HOOKS] == [(hook,), ()]
        assert [len(table) for table in before] == [2, 1]
        with hooks_of_torch_removed():
            assert [[*table.values()] for table in GLOBAL_FORWARD_HOOKS] == [[hook], []]
            added = register_module_forward_hook(hook)
        added.remove()
        assert [[*table.items()] for table in GLOBAL_FORWARD_HOOKS] == [[*table.items()] for table in before]
    handle.remove()
    assert not any(GLOBAL_FORWARD_HOOKS)


def test_a_compiled_module_says_so() -> None:
    layer = nn.Linear(1, 1)
    assert not is_compiled(layer)
    layer.compile(backend="eager")
    assert is_compiled(layer)


def test_bases_of_normalisation_layers() -> None:
    assert issubclass(nn.SyncBatchNorm, BatchNorm)
    assert issubclass(nn.InstanceNorm1d, NormBase)
    assert not issubclass(nn.InstanceNorm1d, BatchNorm)


def test_a_function_is_applied_to_all_tensors() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(2))
    apply_to_tensors(norm, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, True)
    assert {tensor.dtype for tensor in norm.parameters()} == {torch.float64}


def test_metadata_of_a_state_dict_is_copied() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    target: OrderedDict[str, torch.Tensor] = OrderedDict()
    copy_metadata(state, target)
    assert target._metadata is state._metadata  # type: ignore[attr-defined]


def test_a_recording_and_its_check_have_a_cache_of_parametrizations_of_their_own() -> None:
    """A step inside `parametrize.cached()` took the fake weight of the recording as the real one."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    eager, x = copy.deepcopy(model), torch.randn(4, 4)
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=1, loss_fn=torch.sum, cost="analytic")
    with nn.utils.parametrize.cached():
        cached = model[0].weight
        loss = pipe.step(x)
        assert model[0].weight is cached
    eager(x).sum().backward()
    assert torch.equal(loss, eager(x).sum())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))  # type: ignore[arg-type]


def test_backward_hooks_are_removed_and_put_back() -> None:
    layer, calls = nn.Linear(2, 2), []
    layer.register_full_backward_hook(lambda *_: calls.append("hook"))
    layer.register_full_backward_pre_hook(lambda *_: calls.append("pre"))
    model = nn.Sequential(layer)
    with backward_hooks_removed(model):
        model(torch.ones(1, 2)).sum().backward()
    assert not calls
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["pre", "hook"]


def test_all_modules_are_found_once_breadth_first() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), shared), shared, nn.Module())
    model.register_module("nothing", None)
    assert modules_in(model) == [model, model[0], shared, model[2], model[0][0]]
    assert {*modules_in(model)} == {*model.modules()}
    model[2].add_module("around", model)
    assert len(modules_in(model)) == 5
