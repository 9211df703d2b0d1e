"""sail-sg's lists of nodes: 1,000 programs are read as they were written, and its own ways to write them are known."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from drawn_orders import drawn_order, without_waits

from pipecompile.errors import ScheduleError
from pipecompile.interchange.pipeline_order import order_of_schedule
from pipecompile.interchange.torch_csv import parse_torch_csv
from pipecompile.interchange.zero_bubble_nodes import node_lists, parse_nodes
from pipecompile.schedules import build_schedule


@pytest.mark.sampled(10)
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_programs_are_read_as_they_were_written(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        order = without_waits(drawn_order(Random(seed), plain=True))
        assert parse_nodes(node_lists(order)) == order


def test_chunks_without_a_stage_are_placed_where_they_can_run() -> None:
    for name in ("zbv", "interleaved"):
        order = order_of_schedule(build_schedule(name, 8, 8, n_devices=4), name)
        text = "".join(part.split(", layer_group_idx")[0] + ")\n" for part in node_lists(order).split(")")[:-1])
        assert "layer_group_idx" not in text
        assert parse_nodes(text) == order


def test_ways_to_write_a_node_are_known_and_what_checks_the_optimizer_is_left_out() -> None:
    text = """
    [ScheduledNode(type='F', chunk=0, stage=0, minibatch=0, start_time=0, completion_time=5),
     ScheduledNode(type=<FuncType.RECV_FORWARD: 'RECV_FORWARD'>, stage=0, microbatch=0, chunk=0),
     ScheduledNode(type=B, stage=0, microbatch=0, chunk=0, comm_direction=<CommDirection.NEXT: 0>),
     ScheduledNode(type=FuncType.W, stage=0, microbatch=0, chunk=0),
     ScheduledNode(type=POST_VALIDATION, stage=0, microbatch=0)]
    """
    assert str(parse_nodes(text)) == "0F0,0I0,0W0\n"


def test_b_without_w_is_the_whole_backward() -> None:
    text = "ScheduledNode(type=F, stage=0, microbatch=0) ScheduledNode(type=B, stage=0, microbatch=0)"
    assert str(parse_nodes(text)) == "0F0,0B0\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("type=X, stage=0, microbatch=0", "type='X' of a node is not known"),
        ("type=F, stage=0", "whole numbers"),
        ("type=F, stage=-1, microbatch=0", "whole numbers"),
        ("type=F, stage=0, microbatch=0, seq_split_idx=1", "split along its sequence"),
    ],
)
def test_a_node_that_cannot_be_read_is_refused(fields: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_nodes(f"ScheduledNode({fields})")


def test_what_has_no_node_is_not_written() -> None:
    order = parse_torch_csv("0UNSHARD,0F0,0B0\n")
    with pytest.raises(ScheduleError, match="0UNSHARD has no node"):
        node_lists(order)
    kept = replace(order, rows=(order.rows[0][1:],))
    assert parse_nodes(node_lists(kept)) == kept
