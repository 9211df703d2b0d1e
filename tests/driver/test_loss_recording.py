"""A loss function as a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.loss_recording import record_loss
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.graph.output_merging import join_rules
from pipecompile.options import Options
from pipecompile.pipeline import Pipeline
from tests.support.decoders import Decoder, token_loss, tokens_and_labels


def recorded(loss_fn: Any) -> tuple[Options, Any]:
    tokens, labels = tokens_and_labels()
    pipe: Pipeline = pc.compile(
        Decoder(1), 1, n_microbatches=1, loss_fn=loss_fn, example_args=(tokens,), cost="analytic"
    )
    outputs = LossOutputs.of(pipe.graph, join_rules(BatchFlow(pipe.graph)))
    return pipe._options, record_loss(pipe._options, outputs, labels, 4)


def test_the_graph_takes_output_and_target() -> None:
    _, graph = recorded(token_loss)
    assert len(graph.graph.find_nodes(op="placeholder")) == 2
    assert [node.name for node in graph.graph.nodes if "cross_entropy" in node.name]


def test_what_cannot_be_recorded_gives_none() -> None:
    _, graph = recorded(lambda output, target: output[target > 3].sum())
    assert graph is None or torch.is_tensor(graph)


def test_a_loss_that_is_an_output_has_a_graph() -> None:
    _, graph = recorded(lambda output, target: output)
    assert graph is not None
    assert len(graph.graph.find_nodes(op="placeholder")) == 2


class Counting(nn.Module):
    """Counts samples in Python, which a graph cannot; a step calls the loss as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, output, target):
        self.seen += len(target)
        return nn.functional.mse_loss(output, target)


@pytest.mark.filterwarnings("error::pipecompile.RecordingWarning")
def test_state_of_a_loss_is_left_by_the_step_without_a_warning() -> None:
    loss_fn = Counting()
    pipe = pc.compile(nn.Linear(4, 4), 1, n_microbatches=2, loss_fn=loss_fn, cost="analytic")
    pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert loss_fn.seen == 6
