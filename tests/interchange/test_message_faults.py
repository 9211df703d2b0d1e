"""Each fault of communication is found, with its line and cell, and nothing else."""

from __future__ import annotations

from random import Random

import pytest
from drawn_orders import drawn_order

from pipecompile.interchange.message_faults import message_faults
from pipecompile.interchange.torch_csv import parse_torch_csv

GOOD = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
    "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1\n"
)


def test_a_good_file_has_no_fault() -> None:
    assert message_faults(parse_torch_csv(GOOD)) == []


def test_orders_that_this_package_writes_have_no_fault() -> None:
    for seed in range(60):
        order = drawn_order(Random(seed), communicates=True, plain=True)
        assert message_faults(order) == []


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("0SEND_F0,", "", "rank 1 (line 2), cell 1 1RECV_F0 waits for 0SEND_F0, which is not in rank 0 (line 1)"),
        ("1RECV_F0,", "", "rank 1 (line 2), cell 1 1F0 needs 1RECV_F0, which does not come before it in the row"),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "rank 1 (line 2), cell 1 1F0 needs 1RECV_F0"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "rank 0 (line 1), cell 2 0SEND_F0 sends what the row has not computed"),
        ("0SEND_F0,", "0SEND_F0,0SEND_F0,", "0SEND_F0 is there 2 times"),
        ("1RECV_F0,", "1RECV_F0,0SEND_F3,", "rank 1 (line 2), cell 2 0SEND_F3: stage 0 is on rank 0"),
        ("0F0,", "0F0,0SEND_B0,", "rank 0 (line 1), cell 3 0SEND_B0: stages are 0 to 1"),
        ("0WAIT_SEND_F0,", "", "rank 0 (line 1), cell 3 0SEND_F0 is not waited for, other sends are: torch refuses the file"),
        ("0UNSHARD,0F0,", "0UNSHARD,0WAIT_SEND_F0,0F0,", "0WAIT_SEND_F0 waits for no send before it"),
        ("0UNSHARD,", "0UNSHARD,0UNSHARD,", "rank 0 (line 1), cell 2 0UNSHARD: the stage is unsharded already"),
        ("0UNSHARD,0F0,", "0UNSHARD,0RESHARD,0F0,", "rank 0 (line 1), cell 3 0F0 computes while stage 0 is sharded"),
        (",0RESHARD", ",0RESHARD,0RESHARD", "0RESHARD: the stage is not unsharded"),
        ("0REDUCE_GRAD,0WAIT", "0REDUCE_GRAD,0REDUCE_GRAD,0WAIT", "the reduction of stage 0 is pending"),
        ("1F0,", "1F0,1WAIT_REDUCE_GRAD,", "1WAIT_REDUCE_GRAD: no reduction of this stage is pending"),
        ("1F0,", "1F0,1REDUCE_GRAD,", "rank 1 (line 2): 1REDUCE_GRAD has no WAIT_REDUCE_GRAD"),
        ("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0", "message 1 from rank 0 (line 1) to rank 1 (line 2) is sent by 0SEND_F0 and received by 1RECV_F1"),
    ],
)  # fmt: skip
def test_a_fault_is_found(before: str, after: str, message: str) -> None:
    assert before in GOOD
    faults = message_faults(parse_torch_csv(GOOD.replace(before, after, 1)))
    assert any(message in fault for fault in faults), faults


def test_stages_of_one_rank_send_nothing() -> None:
    faults = message_faults(parse_torch_csv("0F0,0SEND_F0,1RECV_F0,1F0\n"))
    assert faults[0] == "rank 0 (line 1), cell 2 0SEND_F0: stages 0 and 1 are both on this rank"
