"""Time that is up, or Ctrl-C, leaves the best cut with its proven gap, and one warning."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import pipecompile as pc
import pipecompile.partitioners
from pipecompile.partitioners import Partition
from pipecompile.planning import solve_cut as cutting


def build(**options: object) -> pc.Pipeline:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    return pc.compile(model, 3, example_args=(torch.randn(4, 16),), cost="analytic", devices=["cpu"] * 3, **options)


def unproven(monkeypatch: pytest.MonkeyPatch, bound: float = 0.9) -> None:
    """The solver's answer, as if time had been up before it was proven."""
    solve = cutting.partition

    def interrupted(*args: object, **options: object) -> Partition:
        found = solve(*args, **options)
        return replace(found, status="feasible", lower_bound=bound * found.bottleneck)

    monkeypatch.setattr(cutting, "partition", interrupted)


def test_an_unproven_cut_is_used_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch)
    with pytest.warns(pc.PartitionWarning, match=r"or Ctrl-C.* at most 10.00% above.* time_limit=5 seconds") as caught:
        pipe = build(time_limit=5.0, pin={"5": 2})
    assert len([w for w in caught if w.category is pc.PartitionWarning]) == 1
    assert pipe.plan.status == "feasible"
    assert pipe.plan.gap == pytest.approx(0.1)
    assert "gap 10.0%" in str(pipe)


def test_a_proven_cut_and_the_dynamic_program_alone_warn_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.PartitionWarning)
        build()
        unproven(monkeypatch)
        build(partitioner="dp")


def test_ctrl_c_keeps_the_best_cut_so_far() -> None:
    nodes = tuple(pc.partitioners.Node(f"v{i}", 1.0 + i % 3) for i in range(40))
    heard: list[str] = []

    def press(progress: pc.partitioners.Progress) -> None:
        heard.append(progress.phase)
        if progress.phase == "down-sets":
            raise KeyboardInterrupt

    problem = pc.Problem(nodes, tensors=tuple(pc.partitioners.Tensor(f"v{i}", (f"v{i + 7}",), 2.0) for i in range(33)))
    found = pc.partition(problem, 4, progress=press)
    found.verify(problem, 4)
    assert found.status == "feasible"
    assert 0 < found.lower_bound < found.bottleneck
    assert heard[-1] == "down-sets"
