"""A loss function as a graph."""

from __future__ import annotations

from typing import Any

import torch

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
