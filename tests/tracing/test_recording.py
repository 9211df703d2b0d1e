"""Which recording is made: the batch size, the grad mode, and a second size."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import nn

from pipecompile.batching.call_inputs import flatten
from pipecompile.errors import InputError
from pipecompile.tracing import trace
from pipecompile.tracing.recording import another_size, record
from tests.support.bodies import Body


def test_a_single_sample_is_recorded_for_any_size() -> None:
    graph = trace(Body(lambda _, x: x * 2), torch.randn(1, 4))
    assert graph.facts.batch_size is None
    assert graph(torch.randn(5, 4)).shape == (5, 4)


def test_a_branch_on_the_single_sample_is_recorded_for_it_alone() -> None:
    graph = trace(Body(lambda _, x: x * 2 if x.shape[0] == 1 else x), torch.randn(1, 4))
    assert graph.facts.batch_size == 1


@pytest.mark.parametrize("around", [True, False])
def test_the_grad_mode_counts_only_if_the_model_reads_it(around: bool) -> None:
    x = torch.randn(3, 4)
    with torch.set_grad_enabled(around):
        reads = trace(Body(lambda _, x: x * 2 if torch.is_grad_enabled() else x), x)
        ignores = trace(Body(lambda _, x: x * 2), x)
    assert reads.facts.grad_mode is around
    assert ("mul" in str(reads)) is around
    assert ignores.facts.grad_mode is None


def test_another_size_is_recorded_only_for_a_graph_of_a_single_size() -> None:
    model = Body(lambda _, x: torch.cat([row * 2 for row in x], 0) if x.shape[0] == 3 or x.shape[0] == 4 else x)
    inputs = flatten(model.forward, (torch.randn(3, 4),), {}, None)
    graph = record(model, inputs)
    assert graph.facts.batch_size == 3
    other = another_size(model, graph, inputs)
    assert other is not None
    assert other.facts.batch_size == 4
    free = record(Body(lambda _, x: x * 2), inputs)
    assert another_size(model, free, inputs) is None


def test_a_model_whose_forward_has_batch_dims_gets_them() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor, batch_dims: dict[str, int] | None = None) -> torch.Tensor:
            return x * len(batch_dims or ())

    graph = trace(Own(), torch.randn(3, 4), batch_dims={"x": 1, "y": 2})
    assert graph.facts.dims[0] == 0
    assert "mul(x, 2)" in str(graph)


def test_batch_dims_of_no_parameter_are_refused() -> None:
    with pytest.raises(InputError, match="batch_dims"):
        trace(nn.Linear(4, 4), torch.randn(3, 4), batch_dims={"nothing": 0})


def test_threads_that_record_at_the_same_time_wait_for_each_other() -> None:
    x, errors = torch.randn(4, 4), []

    def record_often() -> None:
        try:
            for _ in range(4):
                trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x)
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=record_often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
