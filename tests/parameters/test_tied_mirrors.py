from __future__ import annotations

from threading import Lock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipecompile.parameters.tied_mirrors import Mirror, MirroredModule, Mirrors

CPU = torch.device("cpu")


def test_the_mirror_of_a_parameter_is_a_parameter_with_values_of_its_own() -> None:
    weight, statistics = nn.Parameter(torch.ones(2), requires_grad=False), torch.zeros(2)
    for home in (weight, statistics):
        mirror = Mirror.of(home, CPU)
        assert isinstance(mirror.copy, nn.Parameter) == isinstance(home, nn.Parameter)
        assert mirror.copy.requires_grad == home.requires_grad
        assert mirror.copy.data_ptr() != home.data_ptr()
        assert torch.equal(mirror.copy, home)


def test_a_refresh_copies_values_dtype_and_requires_grad_and_drops_the_gradient() -> None:
    weight = nn.Parameter(torch.ones(2))
    mirror = Mirror.of(weight, CPU)
    mirror.copy.grad = torch.ones(2)
    with torch.no_grad():
        weight.data = torch.full((2,), 3.0, dtype=torch.float64)
    weight.requires_grad_(requires_grad=False)
    mirror.refresh()
    assert torch.equal(mirror.copy, weight)
    assert (mirror.copy.dtype, mirror.copy.requires_grad, mirror.copy.grad) == (torch.float64, False, None)


def test_settling_adds_the_gradient_once() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 5.0)
    mirror = Mirror.of(weight, CPU)
    mirrors = Mirrors((mirror,))
    mirrors.refresh()
    (mirror.copy * 2).sum().backward()
    mirrors.settle()
    mirrors.settle()
    assert weight.grad.tolist() == [7.0, 7.0]
    assert mirror.copy.grad is None


def test_a_mirrored_module_computes_with_the_mirror_and_keeps_its_own_tensors() -> None:
    layer = nn.Linear(2, 2, bias=False)
    mirror = Mirror.of(layer.weight, CPU)
    mirror.copy.data.zero_()
    home, x = layer.weight, torch.ones(1, 2)
    module = MirroredModule(layer, [(layer, "weight", mirror)], Lock())
    assert not module(x).any()
    assert layer.weight is home
    assert torch.equal(layer(x), F.linear(x, home))


def test_a_mirrored_module_restores_its_tensors_after_an_error() -> None:
    layer, lock = nn.Linear(2, 2), Lock()
    home = layer.weight
    module = MirroredModule(layer, [(layer, "weight", Mirror.of(home, CPU))], lock)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.ones(1, 3))
    assert layer.weight is home
    assert not lock.locked()


def test_sparse_and_dense_gradients_meet() -> None:
    weight = nn.Parameter(torch.randn(4, 2))
    mirror = Mirror.of(weight, weight.device)
    F.embedding(torch.tensor([1, 1]), weight, sparse=True).sum().backward()
    (mirror.copy * 2).sum().backward()
    mirror.settle()
    wanted = torch.full((4, 2), 2.0)
    wanted[1] += 2
    assert torch.equal(weight.grad.to_dense() if weight.grad.is_sparse else weight.grad, wanted)


def test_what_is_written_on_a_mirror_comes_home() -> None:
    table, statistics = nn.Parameter(torch.full((4, 2), 9.0)), torch.zeros(2)
    for home, write in (
        (table, lambda copy: F.embedding(torch.tensor([1]), copy, max_norm=1.0)),
        (statistics, lambda copy: F.batch_norm(torch.ones(3, 2), copy, torch.ones(2), training=True)),
    ):
        mirror = Mirror.of(home, home.device)
        mirror.refresh()
        before = home.detach().clone()
        with torch.no_grad():
            write(mirror.copy)
        mirror.settle()
        assert not torch.equal(home, before)
        assert torch.equal(home, mirror.copy)
