from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipecompile.torch_private.modes import KnownValuesMode
from pipecompile.tracing import trace
from pipecompile.tracing.fakes import shared_results


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


@pytest.fixture
def computed(monkeypatch) -> list[str]:
    """The operators whose results are computed on fake tensors, from an empty store."""
    names: list[str] = []
    original = KnownValuesMode._dispatch_impl

    def noted(self, func, types, args, kwargs):
        names.append(str(func))
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(shared_results, "_known", {})
    monkeypatch.setattr(KnownValuesMode, "_dispatch_impl", noted)
    return names


def record(body, size: int = 4):
    return trace(Body(body), torch.randn(size, 6))


def soft(x):
    return torch.softmax(x.view(-1, 2, 3), -1)


@pytest.mark.smoke
def test_a_second_recording_computes_no_result_again_and_is_the_same(computed):
    first, n_first = record(soft), len(computed)
    second = record(soft)
    assert "aten._softmax.default" in computed[:n_first]
    assert "aten._softmax.default" not in computed[n_first:]
    assert str(first) == str(second)


def test_another_number_of_samples_is_computed(computed):
    record(soft)
    computed.clear()
    record(soft, 8)
    assert "aten._softmax.default" in computed


def test_other_settings_of_kernels_are_computed(computed):
    record(soft)
    computed.clear()
    with sdpa_kernel(SDPBackend.MATH):
        record(soft)
    assert "aten._softmax.default" in computed


@pytest.mark.parametrize(
    "body, guard",
    [
        (lambda x: x.squeeze() + 1, "Ne(batch_size, 1)"),
        (lambda x: torch.stack([row * 2 for row in x]).exp(), "Eq(batch_size, 4)"),
        (lambda x: (x + torch.ones(4, 6)).exp(), "Eq(batch_size, 4)"),
        (lambda x: x.exp() if x.shape[0] > 2 else x, "batch_size > 2"),
        (lambda x: torch.cat([x.view(2, -1), torch.ones(2, 12)]).exp(), None),
    ],
)
def test_guards_are_made_again(computed, body, guard):
    found = [[str(one) for one in record(body).facts.guards] for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert guard is None or guard in found[0]


def test_what_is_computed_behind_a_guard_is_not_shared(computed):
    def branch(x):
        return x.exp() if x.shape[0] > 2 else x

    record(branch)
    computed.clear()
    record(torch.exp)
    assert "aten.exp.default" in computed


def test_the_store_is_bounded(computed, monkeypatch):
    monkeypatch.setattr(shared_results, "_MOST", 3)
    record(soft)
    record(lambda x: soft(x).exp().sin().cos().tanh())
    assert 0 < len(shared_results._known) <= 3
