"""The flag is of one thread and one block, and unknown while a model is recorded."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.recompute_flag import recomputation


def test_the_flag_is_of_the_block_and_of_the_thread() -> None:
    seen = []
    with recomputation:
        thread = threading.Thread(target=lambda: seen.append(pc.is_recomputing()))
        thread.start()
        thread.join()
        with recomputation:
            assert pc.is_recomputing()
        assert pc.is_recomputing()
    assert not pc.is_recomputing()
    assert seen == [False]


def test_the_flag_is_cleared_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), recomputation:
        raise ZeroDivisionError
    assert not pc.is_recomputing()


def test_a_submodule_that_reads_the_flag_is_one_node() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[0] += not pc.is_recomputing()
            return self.layer(x)

    model = nn.Sequential(nn.Linear(4, 4), Counts())
    graph = pc.trace(model, torch.randn(2, 4))
    assert [reason.piece.name for reason in graph.facts.kept] == ["1"]
    graph(torch.randn(3, 4))
    assert model[1].calls == [1]
