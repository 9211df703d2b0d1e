"""Messages between this rank and one other, in the order of the program.

    rank 0   0F0  put v#0 ────────────► take v#0  1F0   rank 1       the next receives are posted ahead,
                  0F1           c10d    posted: v#1                   so that messages come while the rank computes

What a value of a name looked like the last time, both ends remember. Looks it the same again, it is one message, or two when
it is large, for which the receiver has room before they come:

    small     [head | bytes]            copied, from and to memory that is kept
    large     [head], [bytes]           from the value itself, into the new one

The head has the name's mark, whether the value looks as it did, and how many messages of the other have been taken. A value
that is new, or looks different, goes aside: header and bytes, under a tag of their own, with nothing posted ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from pipecompile.distributed.message_layout import HEADER, MessageLayout, PayloadKind, encoded, name_checksum, raw

__all__ = ["Channel", "Inbox", "Outbox", "Waiter"]

SMALL = 1 << 17
"""Bytes up to which copying is cheaper than a message more."""

AHEAD = 2
"""How many values are received while none is asked for."""

BEHIND = 8
"""How many large values may wait to be sent. A program is proven to end even if every one is waited for."""

_HEAD = 8
_MARK, _IS_SAME, _TAKEN = range(3)
"""The length of a head, and the places in it."""

Waiter = Callable[[dist.Work, str], None]
"""Waits until something of this name is sent or received."""


class Channel:
    """Both ways between this rank and `peer`, on the ranks' backend, under the tags `tag` and `tag + 1`."""

    def __init__(self, backend: Any, peer: int, tag: int, wait: Waiter) -> None:
        self.backend, self.peer, self.tag, self.wait = backend, peer, tag, wait
        self.taken = 0
        """Messages taken from the peer, as it is told with the next one to it."""

    def send(self, part: torch.Tensor, *, aside: bool = False) -> dist.Work:
        work: dist.Work = self.backend.send([part], self.peer, self.tag + aside)
        return work

    def receive(self, part: torch.Tensor, *, aside: bool = False) -> dist.Work:
        work: dist.Work = self.backend.recv([part], self.peer, self.tag + aside)
        return work


class MessageBuffer:
    """Memory of one end for the values of one name that have this layout. `head` is read and written by numpy, which is faster.

    `value` is where a small value is, `large` where the next large one comes to; `last` is the number of the message last sent.
    """

    def __init__(self, name: str, layout: MessageLayout) -> None:
        self.layout = layout
        self.is_small = layout.nbytes <= SMALL
        inline = layout.nbytes if self.is_small else 0
        with torch.inference_mode(False):
            self.bytes = torch.zeros(8 * _HEAD + inline, dtype=torch.uint8, device="cpu")
            self.head = self.bytes[: 8 * _HEAD].view(torch.int64).numpy()
            content = self.bytes[8 * _HEAD :].view(layout.dtype)
            is_here = self.is_small and layout.kind is PayloadKind.TENSOR
            self.value = content.as_strided(layout.shape, layout.strides) if is_here else None
        self.head[_MARK] = name_checksum(name)
        self.works: list[dist.Work] = []
        self.large: torch.Tensor | None = None
        self.last = 0


class Outbox:
    """What this rank sends to a peer."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.slots: dict[str, MessageBuffer] = {}
        self.sent = 0
        self.pending: deque[tuple[int, str, list[dist.Work]]] = deque()

    def put(self, name: str, value: Any, *, once: bool = False) -> None:
        """Begin to send. The value must stay as it is until `flush`. `once`: it is not to be remembered."""
        slot = None if once else self.slots.get(name)
        if slot is None:
            self._sent(name, self._aside(name, value, once=once))
            return
        self.taken(slot.last)  # its memory is free
        if slot.layout.is_of(value):
            plain = None if value is None else value.detach()
        else:
            layout, plain = encoded(value)
            if layout != slot.layout:
                self._sent(name, [*self._changed(slot), *self._aside(name, value)])
                return
        self._sent(name, self._same(slot, plain))
        slot.last = self.sent

    def _same(self, slot: MessageBuffer, plain: Any) -> list[dist.Work]:
        slot.head[_IS_SAME], slot.head[_TAKEN] = 1, self.channel.taken
        if slot.value is not None:
            slot.value.copy_(plain)
        works = [self.channel.send(slot.bytes)]
        if not slot.is_small:
            works.append(self.channel.send(raw(plain)))
        return works

    def _changed(self, slot: MessageBuffer) -> list[dist.Work]:
        """What the other has room for is sent, but only its head says something."""
        slot.head[_IS_SAME], slot.head[_TAKEN] = 0, self.channel.taken
        works = [self.channel.send(slot.bytes)]
        if not slot.is_small:
            works.append(self.channel.send(torch.empty(slot.layout.nbytes, dtype=torch.uint8, device="cpu")))
        return works

    def _aside(self, name: str, value: Any, *, once: bool = False) -> list[dist.Work]:
        with torch.inference_mode(False):
            layout, plain = encoded(value)
            numbers = torch.tensor([name_checksum(name), *layout.numbers()], device="cpu")
        works = [self.channel.send(numbers, aside=True)]
        if plain is not None and layout.nbytes:
            works.append(self.channel.send(raw(plain), aside=True))
        if not once:
            _remember(self.slots, name, layout)
        return works

    def _sent(self, name: str, works: list[dist.Work]) -> None:
        self.sent += 1
        self.pending.append((self.sent, name, works))
        if len(self.pending) > BEHIND and len(works) > 1:
            self._wait_for_oldest()

    def taken(self, count: int) -> None:
        """The peer has taken so many: what they needed is given back."""
        while self.pending and self.pending[0][0] <= count:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, name, works = self.pending[0]
        for work in works:
            self.channel.wait(work, name)
        self.pending.popleft()

    def flush(self) -> None:
        """Return when all is sent."""
        while self.pending:
            self._wait_for_oldest()


class Inbox:
    """What a peer sends to this rank. `told` is how many messages of this rank it has taken, as far as it said."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.slots: dict[str, MessageBuffer] = {}
        self.expected: deque[str] = deque()
        self.posted: deque[MessageBuffer] = deque()
        self.told = 0

    def expect(self, names: Iterable[str]) -> None:
        """These values will come, in this order, after those that are expected."""
        self.expected.extend(names)
        self._post()

    def _post(self) -> None:
        """Give room to the next values, up to the first of which nobody knows how much it needs."""
        while self.expected and len(self.posted) < AHEAD:
            slot = self.slots.get(self.expected[0])
            if slot is None or slot in self.posted:
                return
            slot.works = [self.channel.receive(slot.bytes)]
            if not slot.is_small:
                slot.large = slot.layout.room()
                slot.works.append(self.channel.receive(raw(slot.large)))
            self.posted.append(slot)
            self.expected.popleft()

    def take(self, name: str) -> Any:
        """The next value, which must be the one called so. Raises ConnectionError when another comes."""
        self._post()
        if self.posted:
            value = self._from(self.posted.popleft(), name)
        else:
            self.expected.popleft()
            value = self._aside(name)
        self.channel.taken += 1
        self._post()
        return value

    def take_once(self, name: str) -> Any:
        """A value that was sent once, not to be remembered."""
        value = self._aside(name, once=True)
        self.channel.taken += 1
        return value

    def _from(self, slot: MessageBuffer, name: str) -> Any:
        for work in slot.works:
            self.channel.wait(work, name)
        _check(slot.head[_MARK], name)
        self.told = int(slot.head[_TAKEN])
        large, slot.large, slot.works = slot.large, None, []
        if not slot.head[_IS_SAME]:
            return self._aside(name)
        return slot.layout.decoded(large if slot.value is None else slot.value.clone())

    def _aside(self, name: str, *, once: bool = False) -> Any:
        with torch.inference_mode(False):
            numbers = torch.empty(1 + HEADER, dtype=torch.int64, device="cpu")
            self.channel.wait(self.channel.receive(numbers, aside=True), name)
            mark, *rest = numbers.tolist()
            _check(mark, name)
            layout = MessageLayout.read(rest)
            made = layout.room()
            if layout.nbytes:
                self.channel.wait(self.channel.receive(raw(made), aside=True), name)
            if not once:
                _remember(self.slots, name, layout)
            return layout.decoded(made)


def _remember(slots: dict[str, MessageBuffer], name: str, layout: MessageLayout) -> None:
    """Both ends do this with the same layout, so that they agree about what comes next time. Objects have no fixed length."""
    if layout.kind is PayloadKind.OBJECT:
        slots.pop(name, None)
    else:
        slots[name] = MessageBuffer(name, layout)


def _check(mark: int, name: str) -> None:
    if int(mark) != name_checksum(name):
        raise ConnectionError("it sent another value: the ranks are not in the same step")
