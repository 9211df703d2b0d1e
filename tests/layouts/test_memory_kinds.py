"""Bytes by kind: what shards save, what tied parameters count."""

from __future__ import annotations

import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.layouts.memory_kinds import DeviceBytes, StageWeights, stage_weights


def test_one_copy_holds_each_kind_once() -> None:
    held = DeviceBytes.of([StageWeights(100.0, 80.0)], 7.0, replicas=1, shards=1, optimizer_state=2)
    assert (held.parameters, held.gradients, held.optimizer, held.activations) == (100, 80, 160, 7)
    assert held.total == 347


def test_copies_need_a_message_of_the_largest_stage_where_that_is_more_than_activations() -> None:
    stages = [StageWeights(100.0, 80.0), StageWeights(20.0, 20.0)]
    assert DeviceBytes.of(stages, 7.0, replicas=2, shards=1, optimizer_state=0).activations == 80
    assert DeviceBytes.of(stages, 90.0, replicas=2, shards=1, optimizer_state=0).activations == 90


def test_shards_divide_the_optimizer_and_add_their_part_to_the_rest() -> None:
    held = DeviceBytes.of([StageWeights(100.0, 80.0)], 200.0, replicas=4, shards=4, optimizer_state=2)
    assert (held.parameters, held.gradients, held.optimizer) == (125, 100, 40)


def test_a_stage_counts_a_parameter_once_and_frozen_ones_as_not_trained() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.requires_grad_(False)
    graph = note_ties(pc.trace(nn.Sequential(first, second, first), torch.randn(3, 4)))
    names = [node.name for node in compute_nodes(graph)]
    assert stage_weights(graph, dict.fromkeys(names, 0), 1) == [StageWeights(128.0, 64.0)]
    apart = stage_weights(graph, {name: min(i, 2) for i, name in enumerate(names)}, 3)
    assert [stage.parameters for stage in apart] == [64.0, 64.0, 64.0]
