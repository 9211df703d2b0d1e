from __future__ import annotations

from typing import Any

import torch

from pipecompile.distributed.messages.value_transport import GlooValues, StepState, moved
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators


def test_values_go_through_the_messages_of_the_control_group() -> None:
    def run(communicator: ThreadCommunicator) -> Any:
        communicator.connect()
        values = GlooValues(communicator)
        values.connect([(0, 1)])
        values.begin(lambda: StepState("a step", ""))
        if communicator.ranks.index == 0:
            values.send(1, "v", torch.ones(2), "key")
            values.finish()
            return None
        values.expect(0, ["v"])
        return values.receive(0, "v", "key")

    assert torch.equal(run_communicators(2, run)[1], torch.ones(2))


def test_a_received_value_is_a_leaf_on_the_device_of_the_rank() -> None:
    assert moved("text", torch.device("meta")) == "text"
    value = torch.ones(2, requires_grad=True)
    assert moved(value, torch.device("cpu")) is value
    there = moved(value, torch.device("meta"))
    assert (there.device.type, there.requires_grad, there.is_leaf) == ("meta", True, True)
