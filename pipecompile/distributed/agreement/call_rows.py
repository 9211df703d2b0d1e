"""The rows of numbers that two ranks send each other before a call. They have a tag of their own, and memory that is kept.

rank 0   call 1: send, receive ─ run ─ post the receive of call 2     a row whose receive is posted takes one way, not three
rank 1   call 1: send, receive ─ run ─ post the receive of call 2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.messages.mailboxes import Channel
from pipecompile.distributed.protocol import ROW

__all__ = ["CallRows"]


class CallRows:
    """The rows of up to `length` numbers of int64 between one rank of a pipeline and its peers."""

    def __init__(self, communicator: Communicator, length: int) -> None:
        self._communicator, self._length = communicator, length
        self._ends: dict[int, _RowEnd] = {}

    def expect(self, peers: Iterable[int]) -> None:
        """Post a receive for the next row of each peer, unless one is posted. If none can come any more, `receive` raises and not this."""
        for peer in peers:
            with suppress(RuntimeError):
                self._end(peer).post()

    def send(self, peer: int, row: Sequence[int]) -> None:
        """Begin to send a row. Raises RankLost."""
        try:
            self._end(peer).send(row)
        except RuntimeError as error:
            raise self._communicator.connection_lost(peer, "", error) from None

    def receive(self, peer: int, name: str) -> list[int]:
        """Return the next row of a peer, with zeros behind it. Raises RankLost; `name` says what is awaited."""
        try:
            return self._end(peer).receive(name)
        except RuntimeError as error:
            raise self._communicator.connection_lost(peer, name, error) from None

    def flush(self) -> None:
        """Return when all rows are sent. Raises RankLost."""
        for peer, end in self._ends.items():
            try:
                end.flush()
            except RuntimeError as error:
                raise self._communicator.connection_lost(peer, "", error) from None

    def _end(self, peer: int) -> _RowEnd:
        """Return the end of the present connection to a peer."""
        channel, end = self._communicator.channel(peer), self._ends.get(peer)
        if end is None or end.channel is not channel:
            end = self._ends[peer] = _RowEnd(channel, self._length)
        return end


class _RowEnd:
    """Both directions to one peer: a row to send and its last send, a row to receive and its posted receive."""

    def __init__(self, channel: Channel, length: int) -> None:
        self.channel = channel
        with torch.inference_mode(False):
            self._outgoing, self._incoming = (torch.zeros(length, dtype=torch.int64, device="cpu") for _ in range(2))
        self._sent: dist.Work | None = None
        self._posted: dist.Work | None = None

    def post(self) -> dist.Work:
        if self._posted is None:
            self._posted = self.channel.receive(self._incoming, ROW)
        return self._posted

    def flush(self) -> None:
        if self._sent is not None:
            self.channel.wait(self._sent, "")
            self._sent = None

    def send(self, row: Sequence[int]) -> None:
        self.flush()
        numbers = self._outgoing.numpy()
        numbers[: len(row)], numbers[len(row) :] = row, 0
        self._sent = self.channel.send(self._outgoing, ROW)

    def receive(self, name: str) -> list[int]:
        self.channel.wait(self.post(), name)
        self._posted = None
        return list(self._incoming.tolist())
