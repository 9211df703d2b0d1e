"""Point-to-point messages between this rank and one peer, in the order of the program.

    rank 0   0F0  send v#0 ──────────► receive v#0  1F0   rank 1     receives are posted ahead, so that
                  0F1          c10d    posted: v#1                   messages arrive while the rank computes

Both ends remember, per name, the layout of the last value. A value with the same layout takes one message, or two if it is
large, into memory that the receiver has allocated before the message comes:

    small     [head + payload]      copied from and to buffers that are kept
    large     [head] [payload]      sent from the value itself, received into the new one

A value with another layout, and the first value of a name, goes under a tag of its own: header and payload, with no receive
posted ahead. Kinds, tags and credit of messages are in `protocol`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from pipecompile.distributed.messages.message_layout import (
    HEADER_LENGTH,
    MessageLayout,
    PayloadKind,
    as_bytes,
    encode,
    name_checksum,
)
from pipecompile.distributed.protocol import (
    ABORT,
    CHANGED,
    CREDIT,
    HEAD_LENGTH,
    LARGE,
    NEW,
    SMALL,
    HeadField,
    MessageKind,
    Tag,
    tag_of,
)
from pipecompile.torch_private.process_groups import close_connections

__all__ = ["Channel", "Inbox", "Outbox", "Waiter", "check_name"]

_NAME, _IS_SAME, _RECEIVED = map(int, (HeadField.NAME, HeadField.IS_SAME, HeadField.RECEIVED))

_OTHER_VALUE = "it sent another value: the ranks are not in the same step"

Waiter = Callable[[dist.Work, str], None]
"""A function that waits for a send or receive; its string is the name of the value."""


class Channel:
    """Both directions between this rank and `peer`, on a c10d backend, with the tags of its use `number`."""

    def __init__(self, backend: Any, peer: int, number: int, wait: Waiter) -> None:
        self.backend, self.peer, self.wait = backend, peer, wait
        self._tags = {tag: tag_of(number, tag) for tag in Tag}
        self.received = 0
        """Number of messages received from the peer. The next head to the peer acknowledges them."""

    def abort(self) -> None:
        """Close the connections of the backend."""
        close_connections(self.backend, self._tags[ABORT.tag])

    def send(self, part: torch.Tensor, kind: MessageKind) -> dist.Work:
        """Begin to send one part of a message."""
        work: dist.Work = self.backend.send([part], self.peer, self._tags[kind.tag])
        return work

    def receive(self, part: torch.Tensor, kind: MessageKind) -> dist.Work:
        """Post a receive for one part of a message."""
        work: dist.Work = self.backend.recv([part], self.peer, self._tags[kind.tag])
        return work


class MessageBuffer:
    """Memory of one end for the values of one name and layout.

    `bytes` has the head and the payload of a small value; `head` and `value` are views of it. `head` is a memoryview, whose
    element access is faster than that of a tensor. `large` is the tensor that receives the next large value. `last` is the
    number of the message that was sent last.
    """

    def __init__(self, name: str, layout: MessageLayout) -> None:
        self.layout = layout
        self.kind = SMALL if layout.nbytes <= CREDIT.small_bytes else LARGE
        inline = layout.nbytes if self.kind is SMALL else 0
        with torch.inference_mode(False):
            self.bytes = torch.zeros(8 * HEAD_LENGTH + inline, dtype=torch.uint8, device="cpu")
            self.head = self.bytes[: 8 * HEAD_LENGTH].view(torch.int64).numpy().data
            payload = self.bytes[8 * HEAD_LENGTH :].view(layout.dtype)
            is_inline = self.kind is SMALL and layout.kind is PayloadKind.TENSOR
            self.value = payload.as_strided(layout.shape, layout.strides) if is_inline else None
        self.name, self.checksum = name, name_checksum(name)
        self.head[_NAME] = self.checksum
        self.works: list[dist.Work] = []
        self.large: torch.Tensor | None = None
        self.last = 0


class Outbox:
    """The sending end. `sent` counts messages; `pending` has their numbers, names and c10d works, oldest first."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.buffers: dict[str, MessageBuffer] = {}
        self.sent = 0
        self.pending: deque[tuple[int, str, list[dist.Work]]] = deque()

    def send(self, name: str, value: Any, *, once: bool = False) -> None:
        """Begin to send a value, which must not change until `flush`. With `once`, its layout is not remembered."""
        buffer = None if once else self.buffers.get(name)
        if buffer is None:
            self._add_pending(name, self._send_new(name, value, once=once))
            return
        self.release(buffer.last)  # the buffer may be written again
        if buffer.layout.fits(value):
            plain = None if value is None else value.detach()
        else:
            layout, plain = encode(value)
            if layout != buffer.layout:
                self._add_pending(name, [*self._send_changed(buffer), *self._send_new(name, value)])
                return
        self._add_pending(name, self._send_repeated(buffer, plain))
        buffer.last = self.sent

    def _send_repeated(self, buffer: MessageBuffer, plain: Any) -> list[dist.Work]:
        buffer.head[_IS_SAME], buffer.head[_RECEIVED] = 1, self.channel.received
        if buffer.value is not None:
            buffer.value.copy_(plain)
        works = [self.channel.send(buffer.bytes, buffer.kind)]
        if buffer.kind is LARGE:
            works.append(self.channel.send(as_bytes(plain), LARGE))
        return works

    def _send_changed(self, buffer: MessageBuffer) -> list[dist.Work]:
        """Send as many bytes as the peer has posted receives for; only the head has a meaning."""
        buffer.head[_IS_SAME], buffer.head[_RECEIVED] = 0, self.channel.received
        works = [self.channel.send(buffer.bytes, CHANGED)]
        if buffer.kind is LARGE:
            padding = torch.empty(buffer.layout.nbytes, dtype=torch.uint8, device="cpu")
            works.append(self.channel.send(padding, CHANGED))
        return works

    def _send_new(self, name: str, value: Any, *, once: bool = False) -> list[dist.Work]:
        with torch.inference_mode(False):
            layout, plain = encode(value)
            header = torch.tensor([name_checksum(name), *layout.to_header()], device="cpu")
        works = [self.channel.send(header, NEW)]
        if plain is not None and layout.nbytes:
            works.append(self.channel.send(as_bytes(plain), NEW))
        if not once:
            _remember(self.buffers, name, layout)
        return works

    def _add_pending(self, name: str, works: list[dist.Work]) -> None:
        self.sent += 1
        self.pending.append((self.sent, name, works))
        if len(self.pending) > CREDIT.unsent and len(works) > 1:
            self._wait_for_oldest()

    def release(self, count: int) -> None:
        """Drop the first `count` messages, which the peer has received."""
        while self.pending and self.pending[0][0] <= count:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, name, works = self.pending[0]
        for work in works:
            self.channel.wait(work, name)
        self.pending.popleft()

    def flush(self) -> None:
        """Return when all messages are sent: their values may change."""
        while self.pending:
            self._wait_for_oldest()


class Inbox:
    """The receiving end. `acknowledged` is the number of messages of this rank that the peer has received, by its last head."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.buffers: dict[str, MessageBuffer] = {}
        self.expected: deque[str] = deque()
        self.posted: deque[MessageBuffer] = deque()
        self.acknowledged = 0

    def expect(self, names: Iterable[str]) -> None:
        """Append names to the sequence of values that will come. Their receives are posted when this rank waits for the first of them:
        before that, posting would delay the values that others wait for.
        """
        self.expected.extend(names)

    def _post(self) -> None:
        """Post receives for the next values, up to the credit and to the first value whose layout is not known."""
        while self.expected and len(self.posted) < CREDIT.posted_ahead:
            buffer = self.buffers.get(self.expected[0])
            if buffer is None or buffer in self.posted or not self._has_credit(buffer):
                return
            buffer.works = [self.channel.receive(buffer.bytes, buffer.kind)]
            if buffer.kind is LARGE:
                buffer.large = buffer.layout.allocate()
                buffer.works.append(self.channel.receive(as_bytes(buffer.large), LARGE))
            self.posted.append(buffer)
            self.expected.popleft()

    def _has_credit(self, buffer: MessageBuffer) -> bool:
        """Return whether the next value is small, or few large ones are posted."""
        return buffer.kind is SMALL or sum(one.kind is LARGE for one in self.posted) < CREDIT.large_ahead

    def receive(self, name: str) -> Any:
        """Return the next value. Raises ConnectionError if its name is not `name`."""
        if not self.posted:
            self._post()
        if self.posted:
            value = self._receive_repeated(self.posted.popleft(), name)
        else:
            self.expected.popleft()
            value = self._receive_new(name)
        self.channel.received += 1
        self._post()
        return value

    def receive_once(self, name: str) -> Any:
        """Return a value that was sent with `once`. It must not be in the sequence of `expect`."""
        value = self._receive_new(name, once=True)
        self.channel.received += 1
        return value

    def _receive_repeated(self, buffer: MessageBuffer, name: str) -> Any:
        for work in buffer.works:
            self.channel.wait(work, name)
        head = buffer.head
        if name != buffer.name or head[_NAME] != buffer.checksum:
            raise ConnectionError(_OTHER_VALUE)
        self.acknowledged = head[_RECEIVED]
        large, buffer.large, buffer.works = buffer.large, None, []
        if not head[_IS_SAME]:
            return self._receive_new(name)
        return buffer.layout.decode(large if buffer.value is None else buffer.value.clone())

    def _receive_new(self, name: str, *, once: bool = False) -> Any:
        with torch.inference_mode(False):
            header = torch.empty(1 + HEADER_LENGTH, dtype=torch.int64, device="cpu")
            self.channel.wait(self.channel.receive(header, NEW), name)
            checksum, *rest = header.tolist()
            check_name(checksum, name)
            layout = MessageLayout.from_header(rest)
            content = layout.allocate()
            if layout.nbytes:
                self.channel.wait(self.channel.receive(as_bytes(content), NEW), name)
            if not once:
                _remember(self.buffers, name, layout)
            return layout.decode(content)


def _remember(buffers: dict[str, MessageBuffer], name: str, layout: MessageLayout) -> None:
    """Allocate the buffer of a name. Both ends do so with the same layout; objects have no fixed size and get none."""
    if layout.kind is PayloadKind.OBJECT:
        buffers.pop(name, None)
    else:
        buffers[name] = MessageBuffer(name, layout)


def check_name(checksum: int, name: str) -> None:
    if int(checksum) != name_checksum(name):
        raise ConnectionError(_OTHER_VALUE)
