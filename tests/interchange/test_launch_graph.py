"""What waits for what: times by hand, and deadlocks beside an independent fake of NCCL's rules."""

from __future__ import annotations

from random import Random

import pytest
from drawn_orders import drawn_order, with_moved_messages

from pipecompile.interchange import PipelineOrder
from pipecompile.interchange.communicator_rules import CommunicatorRule
from pipecompile.interchange.launch_graph import LaunchStep, graph_without_messages, launch_graph, received_by
from pipecompile.interchange.message_faults import message_faults
from pipecompile.interchange.torch_csv import parse_torch_csv
from tests.support.nccl_rules import BOTH_WAYS, Deadlock, Launched, Queue, directed, execute

SIMPLE = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
CROSSED = "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2RECV_F1,2F1\n1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1\n"


@pytest.mark.parametrize("rule", list(CommunicatorRule))
def test_a_micro_batch_goes_there_and_back_in_six_forwards(rule: CommunicatorRule) -> None:
    graph = launch_graph(parse_torch_csv(SIMPLE), rule)
    ends = graph.times()
    assert not graph.cycle(ends)
    assert [ends[LaunchStep("passed", 0, index)] for index in range(4)] == [1, 1, 1, 6]
    begin = 1 if rule is CommunicatorRule.LAZY else 0  # the first message waits until both ranks have come to it
    assert [ends[LaunchStep("passed", 1, index)] for index in range(4)] == [begin, 2, 4, 4]


@pytest.mark.parametrize(
    ("rule", "is_stuck"),
    [
        (CommunicatorRule.BUFFERED, False),
        (CommunicatorRule.RENDEZVOUS, True),
        (CommunicatorRule.PAIR, True),
        (CommunicatorRule.RANK, True),
        (CommunicatorRule.LAZY, True),
    ],
)
def test_two_ranks_that_both_send_first_wait_for_ever(rule: CommunicatorRule, is_stuck: bool) -> None:
    graph = launch_graph(parse_torch_csv(CROSSED), rule)
    cycle = graph.cycle(graph.times())
    assert bool(cycle) == is_stuck
    for step, following in zip(cycle, [*cycle[1:], *cycle[:1]], strict=True):
        assert following in graph.waits[step]


def test_overlapping_cells_of_two_ranks_that_need_each_other_are_a_cycle() -> None:
    order = parse_torch_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    graph = graph_without_messages(order)
    assert {step.rank for step in graph.cycle(graph.times())} == {0, 1}


def rows_of(order: PipelineOrder) -> dict[object, list[Launched]]:
    """The order as launches: computations on a stream, each message after the computations before it."""
    placement = order.schedule.placement
    rows: dict[object, list[Launched]] = {}
    for rank, row in enumerate(order.rows):
        launches: list[Launched] = []
        computed: list[Launched] = []
        received: dict[object, Launched] = {}
        for cell in row:
            pair = None
            after = list(computed)
            if cell.is_transfer:
                peer = placement[cell.partner.stage]
                pair = (rank, peer) if cell.is_send else (peer, rank)
            after += [received[need] for need in received_by(cell) if need in received]
            launch = Launched(rank, str(cell) if pair else "compute", cell, after=after, pair=pair)
            if pair is None:
                computed = [launch]
            elif not cell.is_send:
                received[cell] = launch
            launches.append(launch)
        rows[rank] = launches
    return rows


def test_deadlocks_are_those_of_the_fake_of_nccl() -> None:
    """Random sends go later and random receives earlier, so that a third of the orders deadlocks."""
    compared = stuck = 0
    for seed in range(150):
        random = Random(seed)
        order = with_moved_messages(random, drawn_order(random, communicates=True, plain=True))
        if message_faults(order) or order.n_ranks == 1:
            continue
        for rule, queue, communicators in (
            (CommunicatorRule.PAIR, Queue.STREAMS, BOTH_WAYS),
            (CommunicatorRule.RANK, Queue.COMMUNICATORS, directed),
        ):
            graph = launch_graph(order, rule)
            cycle = graph.cycle(graph.times())
            compared += 1
            stuck += bool(cycle)
            try:
                execute(rows_of(order), queue, is_buffered=False, communicators=communicators)
            except Deadlock:
                assert cycle, (seed, rule, str(order))
            else:
                assert not cycle, (seed, rule, str(order))
    assert compared > 100
    assert stuck > 10
