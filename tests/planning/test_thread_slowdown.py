"""Profiled costs of a step in threads: how much longer they are made, and that the measurement leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs import NodeCost
from pipecompile.planning import thread_slowdown as module
from pipecompile.planning.thread_slowdown import slowed, thread_slowdown
from tests.support.compilations import mini_batch, options_of

X = torch.randn(8, 4)
THREADS: dict[str, Any] = {"devices": ["cpu"] * 2, "dispatch": "threads", "n_microbatches": 4}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))


def factor(net: nn.Module, **options: Any) -> float:
    graph, batch = pc.trace(net, X), mini_batch(net, 4, X)
    costs = {"_0": NodeCost(1e-3, 1e-3, 0, 0)}
    return thread_slowdown(graph, batch, batch.first.leaves, costs, options_of(**options), budget=0.0)


def test_all_times_grow_and_bytes_stay() -> None:
    costs = slowed({"a": NodeCost(1.0, 2.0, 3, 4, weight=0.5, dividing=0.25), "b": NodeCost(1.0, 0.0, 0, 0)}, 2.0)
    assert costs["a"] == NodeCost(2.0, 4.0, 3, 4, weight=1.0, dividing=0.5)
    assert costs["b"].weight is None


def test_the_time_beside_others_counts_in_the_share_of_the_step_that_is_no_bubble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_turns", lambda *_: [(1.5, 1.0), (2.0, 1.5), (9.0, 1.5)])
    assert factor(model(), **THREADS) == pytest.approx(2.0 * (1 + 0.5 * 4 / 5))


def test_a_step_in_one_thread_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_turns", None)
    assert factor(model(), **THREADS | {"dispatch": "inline"}) == 1.0


@pytest.mark.parametrize(("net", "is_measured"), [(nn.Linear(4, 4), True), (model(), False)])
def test_auto_runs_in_one_thread_where_draws_have_an_order(
    net: nn.Module, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "choose_dispatch", lambda *_: "threads")
    monkeypatch.setattr(module, "_turns", lambda *_: [(2.0, 1.0)])
    assert factor(net, **THREADS | {"dispatch": "auto"}) == (2.0 if is_measured else 1.0)


def test_compile_predicts_with_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_turns", lambda *_: [(1000.0, 1.0)])
    options: dict[str, Any] = {"example_args": (X,), "cost": "profile", "batch_norm": "each", "n_microbatches": 4}
    inline = pc.compile(model(), 2, devices=["cpu"] * 2, dispatch="inline", **options)
    threads = pc.compile(model(), 2, devices=["cpu"] * 2, dispatch="threads", **options)
    assert threads.simulate().makespan > 20 * inline.simulate().makespan


def test_a_model_that_does_not_run_as_a_whole_keeps_its_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(module, "_pass", fail)
    with caplog.at_level("INFO", logger="pipecompile.partition"):
        assert factor(model(), **THREADS) == 1.0
    assert "OutOfMemoryError: no room" in caplog.text


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def test_threads_have_their_share_of_intra_op_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = list[tuple[bool, int]](), module._pass

    def noted(*args: Any) -> None:
        runs.append((current_thread() is main_thread(), torch.get_num_threads()))
        run(*args)

    monkeypatch.setattr(module, "_pass", noted)
    with intra_op_threads(4):
        assert factor(model(), **THREADS) > 0
        assert torch.get_num_threads() == 4
    assert [count for is_main, count in runs if is_main] == [
        4,
        4,
        2,
        2,
    ]  # warm-up, alone, with its share, beside the other
    assert {count for is_main, count in runs if not is_main} <= {2}


def test_nothing_is_left_behind() -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    options_of(**THREADS)  # seeds
    drawn = torch.get_rng_state()
    factor(net, **THREADS)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


class Branching(nn.Module):
    """A layer whose Python reads values of tensors: it is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y + 1


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


@pytest.mark.parametrize(("net", "most", "others"), [(model, 1 << 20, 1), (model, 0, 0), (Branching, 1 << 20, 0)])
def test_how_many_run_beside(
    net: Callable[[], nn.Module], most: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", most)
    assert module._others_of(pc.trace(net(), X), 2) == others
