from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecompile.distributed.messages.layout_announcements import announce, announced
from pipecompile.distributed.messages.message_layout import MessageLayout, PayloadKind, encode
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators


def exchanged(value: Any, name: str = "v") -> tuple[MessageLayout, Any]:
    def run(communicator: ThreadCommunicator) -> Any:
        communicator.connect()
        channel = communicator.channel(1 - communicator.ranks.index)
        if communicator.ranks.index == 1:
            return announced(channel, name)
        for work in announce(channel, "v", *encode(value)):
            work.wait()
        return None

    layout, payload = run_communicators(2, run)[1]
    return layout, payload


def test_the_layout_of_a_tensor_comes_without_its_elements() -> None:
    layout, payload = exchanged(torch.randn(3, 4, requires_grad=True).t())
    assert (layout.shape, layout.strides, layout.dtype, layout.requires_grad) == ((4, 3), (1, 4), torch.float32, True)
    assert payload is None


def test_an_object_comes_as_a_whole() -> None:
    layout, payload = exchanged([1, "two"])
    assert layout.kind is PayloadKind.OBJECT
    assert layout.decode(payload) == [1, "two"]


def test_nothing_is_a_layout() -> None:
    assert exchanged(None) == (MessageLayout(PayloadKind.NOTHING), None)


def test_another_name_is_an_error() -> None:
    with pytest.raises(ConnectionError, match="not in the same step"):
        exchanged(torch.zeros(2), "w")
