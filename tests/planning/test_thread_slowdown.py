"""Profiled costs of a step in threads: how much longer they are made, and that the measurement leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs import NodeCost
from pipecompile.graph.colocation import compute_nodes
from pipecompile.planning import thread_slowdown as module
from pipecompile.planning.thread_slowdown import slowed, thread_slowdown
from tests.support.compilations import mini_batch, options_of

X = torch.randn(8, 4)
THREADS: dict[str, Any] = {"devices": ["cpu"] * 2, "dispatch": "threads", "n_microbatches": 4}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))


def factor(net: nn.Module, **options: Any) -> float:
    graph, batch = pc.trace(net, X), mini_batch(net, 4, X)
    names = [node.name for node in compute_nodes(graph)]
    costs = {name: NodeCost(1e-3 / len(names), 1e-3 / len(names), 0, 0) for name in names}
    return thread_slowdown(graph, batch, batch.first.leaves, costs, options_of(**options), budget=0.0)


def test_all_times_grow_and_bytes_stay() -> None:
    costs = slowed({"a": NodeCost(1.0, 2.0, 3, 4, weight=0.5, dividing=0.25), "b": NodeCost(1.0, 0.0, 0, 0)}, 2.0)
    assert costs["a"] == NodeCost(2.0, 4.0, 3, 4, weight=1.0, dividing=0.5)
    assert costs["b"].weight is None


def test_the_time_beside_others_counts_in_the_share_of_the_step_that_is_no_bubble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_turns", lambda *_: [(3e-3, 3e-3), (4e-3, 6e-3), (9.0, 6e-3)])
    assert factor(model(), **THREADS) == pytest.approx(2.0 * (1 + 0.5 * 4 / 5))


def test_a_step_in_one_thread_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_turns", None)
    assert factor(model(), **THREADS | {"dispatch": "inline"}) == 1.0


@pytest.mark.parametrize(("net", "is_measured"), [(nn.Linear(4, 4), True), (model(), False)])
def test_auto_runs_in_one_thread_where_draws_have_an_order(
    net: nn.Module, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "choose_dispatch", lambda *_: "threads")
    monkeypatch.setattr(module, "_turns", lambda *_: [(4e-3, 4e-3)])
    assert factor(net, **THREADS | {"dispatch": "auto"}) == pytest.approx(2.0 if is_measured else 1.0)


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
    assert [count for is_main, count in runs if is_main] == [2] * 4  # two pieces, to warm up and alone
    beside = [count for is_main, count in runs if not is_main]
    assert len(beside) >= 2 * (module.PASSES + 1)
    assert set(beside) == {2}


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


def test_a_piece_kept_whole_runs_in_this_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, run = set[bool](), module._pass
    monkeypatch.setattr(module, "_pass", lambda *args: threads.add(current_thread() is main_thread()) or run(*args))
    factor(Branching(), **THREADS)
    assert threads == {True}


def test_an_error_in_a_thread_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    run = module._pass

    def fail(stage: nn.Module, received: Any) -> None:
        if current_thread() is not main_thread() and any(isinstance(m, nn.BatchNorm1d) for m in stage.modules()):
            raise RuntimeError("fails beside others")
        run(stage, received)

    monkeypatch.setattr(module, "_pass", fail)
    assert factor(model(), **THREADS) == 1.0


def test_pieces_are_consecutive_and_take_about_equal_time() -> None:
    graph = pc.trace(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), X)
    costs = {f"_{index}": NodeCost(1.0, 2.0 if index else 10.0, 0, 0) for index in range(6)}
    assert list(module._piece_of(graph, costs, 2).values()) == [0, 1, 1, 1, 1, 1]
    assert list(module._piece_of(graph, {name: NodeCost(0.0, 0.0, 0, 0) for name in costs}, 2).values()) == [0] * 6
