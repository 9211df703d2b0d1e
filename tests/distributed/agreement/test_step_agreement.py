from __future__ import annotations

from typing import Any

import pytest

from pipecompile.distributed.agreement.step_agreement import agree_on_step
from pipecompile.errors import PlanError
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators


def test_a_number_is_equal_in_steps_in_which_all_ranks_are_alike() -> None:
    steps = [("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")]

    def run(communicator: ThreadCommunicator) -> list[int]:
        communicator.connect()
        here = communicator.ranks.index
        return [agree_on_step(communicator, common, own if here == 2 else "") for common, own in steps]

    first, *others = run_communicators(3, run)
    assert others == [first, first]
    assert first[0] == first[1] == first[3] != first[2]


def test_ranks_with_other_batches_all_raise() -> None:
    """Under NCCL they would wait for ever, or receive into memory that is too small."""

    def run(communicator: ThreadCommunicator) -> Any:
        communicator.connect()
        sizes = (4, 4, 3) if communicator.ranks.index == 1 else (4, 4, 4)
        with pytest.raises(PlanError, match="the ranks disagree about the step") as caught:
            agree_on_step(communicator, f"samples {sizes}", "")
        return caught.value.where

    assert set(run_communicators(3, run)) == {"ranks 10, 12: samples (4, 4, 4); rank 11: samples (4, 4, 3)"}
