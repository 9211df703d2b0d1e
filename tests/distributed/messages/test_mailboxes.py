"""Two ranks as threads, under gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipecompile.distributed.messages.mailboxes import Channel, Inbox, Outbox
from pipecompile.distributed.protocol import CREDIT
from tests.distributed.rank_threads import backend, run_ranks

LARGE = CREDIT.small_bytes // 4 + 8
"""float32 elements of a large message."""


def wait(work: dist.Work, name: str) -> None:
    work.wait()


def exchange(send: Callable[[Outbox], None], receive: Callable[[Inbox], Any], number: int = 1) -> tuple[Any, Outbox]:
    """Run `send` on rank 0 and `receive` on rank 1; return the result of `receive` and the outbox."""

    def run(rank: int, store: Store) -> Any:
        channel = Channel(backend(store, rank, 2), 1 - rank, number, wait)
        if rank == 1:
            return receive(Inbox(channel))
        outbox = Outbox(channel)
        send(outbox)
        outbox.flush()
        return outbox

    outbox, result = run_ranks(2, run)
    return result, outbox


def in_order(values: list[tuple[str, Any]], *, once: bool = False) -> list[Any]:
    """The values as they arrive when all names are expected from the beginning."""

    def send(outbox: Outbox) -> None:
        for name, value in values:
            outbox.send(name, value, once=once)

    def receive(inbox: Inbox) -> list[Any]:
        if once:
            return [inbox.receive_once(name) for name, _ in values]
        inbox.expect([name for name, _ in values])
        return [inbox.receive(name) for name, _ in values]

    return exchange(send, receive)[0]


def equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(right, torch.Tensor) else left == right


@pytest.mark.parametrize("size", [4, LARGE])
def test_values_of_one_name_arrive_in_order(size: int) -> None:
    values = [torch.full((size,), float(step)) for step in range(5)]
    arrived = in_order([("h", value) for value in values])
    assert all(map(torch.equal, arrived, values))


def test_names_may_alternate() -> None:
    values = [(name, torch.randn(size)) for _ in range(4) for name, size in (("a", 3), ("b", LARGE), ("c", 5))]
    assert all(equal(found, value) for found, (_, value) in zip(in_order(values), values, strict=True))


@pytest.mark.parametrize(
    "values",
    [
        [torch.ones(3), torch.ones(3), torch.ones(4), torch.ones(4)],
        [torch.ones(LARGE), torch.zeros(LARGE), torch.ones(2), torch.zeros(2)],
        [torch.ones(2), torch.ones(2), torch.ones(LARGE), torch.zeros(LARGE)],
        [torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 3).double()],
        [torch.ones(2), None, None, torch.ones(2)],
        [torch.ones(2), {"an": "object"}, torch.ones(2), 3, 4],
        [None, None, torch.empty(0), torch.empty(0)],
    ],
    ids=["longer", "large to small", "small to large", "strides and dtype", "nothing", "objects", "empty"],
)
def test_a_value_may_change_its_layout(values: list[Any]) -> None:
    arrived = in_order([("h", value) for value in values])
    assert all(map(equal, arrived, values))
    assert [getattr(a, "dtype", None) for a in arrived] == [getattr(v, "dtype", None) for v in values]


def test_values_that_are_sent_once_are_not_expected_and_not_remembered() -> None:
    values = [("spans", [1, 2]), ("spans", [3]), ("w", torch.ones(2)), ("w", torch.zeros(2))]
    assert all(equal(found, value) for found, (_, value) in zip(in_order(values, once=True), values, strict=True))


def test_a_small_value_may_change_after_it_was_sent() -> None:
    """From the second time on: the first is sent from its own memory."""
    value = torch.zeros(3)

    def send(outbox: Outbox) -> None:
        outbox.send("h", value)
        outbox.flush()
        for step in (1, 2):
            value.fill_(step)
            outbox.send("h", value)
        value.fill_(9)

    arrived, _ = exchange(send, lambda inbox: (inbox.expect("hhh"), [inbox.receive("h").tolist() for _ in range(3)])[1])
    assert arrived == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_a_received_value_is_not_overwritten_by_the_next() -> None:
    assert [value.item() for value in in_order([("h", torch.tensor(float(step))) for step in range(4)])] == [0, 1, 2, 3]


def test_a_value_of_another_name_is_an_error() -> None:
    def receive(inbox: Inbox) -> str:
        inbox.expect(["g"])
        with pytest.raises(ConnectionError, match="not in the same step") as caught:
            inbox.receive("g")
        return str(caught.value)

    assert exchange(lambda outbox: outbox.send("h", None), receive)[0]


@pytest.mark.parametrize(("length", "credit"), [(2, CREDIT.posted_ahead), (LARGE, CREDIT.large_ahead)])
def test_receives_are_posted_at_the_first_wait_up_to_the_credit_and_the_first_unknown_layout(
    length: int, credit: int
) -> None:
    names = [*map(str, range(credit + 1))]

    def receive(inbox: Inbox) -> list[int]:
        inbox.expect(names)
        posted = [len(inbox.posted)]
        for name in names:
            inbox.receive(name)
        inbox.expect([*names, "d"])
        posted.append(len(inbox.posted))
        for name in names:
            inbox.receive(name)
            posted.append(len(inbox.posted))
        inbox.receive("d")
        return posted

    def send(outbox: Outbox) -> None:
        for name in (*names, *names, "d"):
            outbox.send(name, torch.ones(length))

    assert exchange(send, receive)[0] == [0, 0, *reversed(range(credit + 1))]


def test_at_most_so_many_large_values_are_unsent() -> None:
    pending = []

    def send(outbox: Outbox) -> None:
        for _ in range(CREDIT.unsent + 4):
            outbox.send("h", torch.ones(2), once=True)
            pending.append(len(outbox.pending))

    exchange(send, lambda inbox: [inbox.receive_once("h") for _ in range(CREDIT.unsent + 4)])
    assert max(pending) == CREDIT.unsent


def test_a_head_acknowledges_the_messages_that_were_taken() -> None:
    """Rank 1 takes two messages and sends one back twice: the second has a head. Rank 0 lets go of what it had sent."""

    def run(rank: int, store: Store) -> int:
        channel = Channel(backend(store, rank, 2), 1 - rank, 0, wait)
        inbox, outbox = Inbox(channel), Outbox(channel)
        if rank == 1:
            inbox.expect("aa")
            for _ in range(2):
                inbox.receive("a")
                outbox.send("b", torch.ones(1))
            outbox.flush()
            return inbox.acknowledged
        for _ in range(2):
            outbox.send("a", torch.ones(1))
        inbox.expect("bb")
        for _ in range(2):
            inbox.receive("b")
        outbox.release(inbox.acknowledged)
        assert not outbox.pending
        return inbox.acknowledged

    assert run_ranks(2, run) == [2, 0]


def test_communicators_of_one_backend_do_not_take_each_others_messages() -> None:
    def run(rank: int, store: Store) -> list[float]:
        shared = backend(store, rank, 2)
        channels = [Channel(shared, 1 - rank, number, wait) for number in (1, 2)]
        if rank == 0:
            outboxes = [Outbox(channel) for channel in channels]
            for value, outbox in enumerate(outboxes):
                outbox.send("h", torch.tensor(float(value)))
            for outbox in outboxes:
                outbox.flush()
            return []
        inboxes = [Inbox(channel) for channel in channels]
        for inbox in inboxes:
            inbox.expect(["h"])
        return [inbox.receive("h").item() for inbox in reversed(inboxes)]

    assert run_ranks(2, run)[1] == [1.0, 0.0]
