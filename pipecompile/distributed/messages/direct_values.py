"""Values that go straight from device to device: nothing is pickled, nothing passes the CPU, and the host does not wait.

    first step      header over the control group, then the elements over the link      the host waits for the header
    later steps     the elements over the link                                          both ends know the layout

A layout is known to two ranks, for one direction, under the key that the caller gives, in all steps on which the ranks agree alike
(`step_agreement`). An object goes over the control group as a whole. A value that is known with another layout than it has is an
error of its sender: the receiver has launched its receive by then. For a gradient that is None it sends zeros: the labels of one
micro-batch may all be ignored, so that its loss has no backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist

from pipecompile.batching.containers import with_tensors
from pipecompile.distributed.agreement.step_agreement import agree_on_step
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.failures.board_watch import watch
from pipecompile.distributed.failures.failure_report import RankLost
from pipecompile.distributed.messages.direct_links import DirectLink, Pair, close_links, open_links
from pipecompile.distributed.messages.layout_announcements import announce, announced
from pipecompile.distributed.messages.message_layout import MessageLayout, PayloadKind, as_bytes, encode
from pipecompile.distributed.messages.rank_streams import RankStreams
from pipecompile.distributed.messages.value_transport import StepState, moved
from pipecompile.errors import InputError, PlanError
from pipecompile.runtime.streams import Streams
from pipecompile.torch_private.device_functions import device_identity

__all__ = ["DirectValues"]


class DirectValues:
    """The `ValueTransport` of ranks on GPUs. A send or receive is launched on the current stream, which goes on when it is over.

    `pending` are the messages that this host has launched and not seen ended: peer, name, event behind it. A work of NCCL holds its
    tensor as long as it lives, so none is kept: the memory of a message is free for the next one of the step. `events` are those of
    earlier steps, to be recorded again. `announcements` are headers under way, with the memory that they are sent from.
    """

    def __init__(self, communicator: Communicator) -> None:
        ranks = communicator.ranks
        self.communicator, self.index, self.device = communicator, ranks.index, ranks.devices[ranks.index]
        self.streams: Streams | None = RankStreams(self.device, ranks.size)
        self.links: dict[Pair, DirectLink] = {}
        self.tables: dict[int, dict[Hashable, MessageLayout]] = {}
        self.layouts: dict[Hashable, MessageLayout] = {}
        self.is_checked = self.is_launching = False
        self.pending: deque[tuple[int, str, torch.Event]] = deque()
        self.events: list[torch.Event] = []
        self.announcements: deque[tuple[int, str, dist.Work]] = deque()
        communicator.breakers.append(self.abort)
        finalize(self, close_links, self.links)
        watch(self)

    def connect(self, pairs: Iterable[Pair]) -> None:
        """Open the links that are not open. All ranks must call this together. Raises InputError if two ranks share a GPU."""
        if not self.is_checked:
            self._check_devices()
            self.is_checked = True
        new = [pair for pair in pairs if pair not in self.links and self.index in pair]
        self.links |= open_links(new, self.communicator.ranks, self.communicator.board.store, self._opened)
        self.finish()

    def _opened(self, peer: int, work: dist.Work) -> None:
        """Wait for the first message of a link."""
        with self._connected(peer, ""):
            self._launched(peer, "", work)

    def _check_devices(self) -> None:
        """Raise InputError, on all ranks, if two have the same GPU: NCCL refuses that, with an error that names no cause."""
        identities = self.communicator.all_gather_text("GPU of each rank", device_identity(self.device))
        ranks_of: dict[str, list[int]] = {}
        for rank, identity in zip(self.communicator.ranks.members, identities, strict=True):
            ranks_of.setdefault(identity, []).append(rank)
        for identity, ranks in ranks_of.items():
            if identity and len(ranks) > 1:
                raise InputError(
                    f"ranks {', '.join(map(str, ranks))} use the same GPU",
                    where=identity,
                    why="each rank of a pipeline runs its stages on a GPU of its own",
                    hint='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before compile',
                )

    def begin(self, state: Callable[[], StepState]) -> None:
        number = agree_on_step(self.communicator, *state())
        self.layouts = self.tables.setdefault(number, {})
        self.is_launching = True

    def check_wait(self) -> None:
        """End what this rank has launched if another rank failed: a cell that waits for its GPU would wait forever."""
        if self.is_launching:
            try:
                self.communicator.check()
            except RankLost as lost:
                if self.is_launching:
                    self.communicator.give_up(lost)

    def interrupt(self) -> None:
        """Return at once: the communicator ends its own waits."""

    def expect(self, source: int, names: Iterable[str]) -> None:
        """Return at once: receives are launched in the order of the program."""

    @torch.inference_mode(False)
    def send(self, target: int, name: str, value: Any, layout: Hashable = None, *, is_gradient: bool = False) -> None:
        key = None if layout is None else (target, layout, True)
        known = self.layouts.get(key)
        if known is not None and value is None and is_gradient:
            payload: torch.Tensor | None = known.allocate(self.device).zero_()
        elif known is not None and known.fits(value, self.device):
            payload = value.detach()
        else:
            now, payload = encode(value, self.device)
            if known is None:
                self._announce(target, name, now, payload)
                self._remember(key, now)
                if now.kind is PayloadKind.OBJECT:
                    return
            elif now != known:
                payload = _as_agreed(payload, now, known, name)
        if payload is not None and payload.nbytes:
            with self._connected(target, ""):
                self._launched(target, name, self._link((self.index, target)).send(as_bytes(payload)))

    def _announce(self, target: int, name: str, layout: MessageLayout, payload: torch.Tensor | None) -> None:
        with self._connected(target, ""):
            works = announce(self.communicator.channel(target), name, layout, payload)
        self.announcements.extend((target, name, work) for work in works)

    @torch.inference_mode(False)
    def receive(self, source: int, name: str, layout: Hashable = None) -> Any:
        key = None if layout is None else (source, layout, False)
        agreed = self.layouts.get(key)
        if agreed is None:
            with self._connected(source, name):
                agreed, given = announced(self.communicator.channel(source), name)
            self._remember(key, agreed)
            if agreed.kind is PayloadKind.OBJECT:
                return with_tensors(agreed.decode(given), partial(moved, device=self.device))
        if agreed.kind is PayloadKind.NOTHING:
            return None
        payload = agreed.allocate(self.device)
        if agreed.nbytes:
            with self._connected(source, name):
                self._launched(source, name, self._link((source, self.index)).receive(as_bytes(payload)))
        return agreed.decode(payload)

    def _link(self, pair: Pair) -> DirectLink:
        """Return a link. Raises RuntimeError after `abort`."""
        if (link := self.links.get(pair)) is None:
            raise RuntimeError("the links are broken")
        return link

    @contextmanager
    def _connected(self, peer: int, name: str) -> Iterator[None]:
        """Raise RankLost for an error of a message inside the context; with an empty name, of a message to the peer."""
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            raise self.communicator.connection_lost(peer, name, error) from None

    def _remember(self, key: Hashable, layout: MessageLayout) -> None:
        """Note the agreed layout of a tensor. Objects have no fixed size, and None may be a tensor later: they are announced each time."""
        if key is not None and layout.kind is PayloadKind.TENSOR:
            self.layouts[key] = layout

    def _launched(self, peer: int, name: str, work: dist.Work) -> None:
        """Let the current stream, on a CPU this thread, wait for a message."""
        if self.device.type == "cpu":
            self.communicator.wait(peer, work, name)
        else:
            work.wait()
            stream = torch.accelerator.current_stream(self.device)
            self.pending.append((peer, name, stream.record_event(self.events.pop() if self.events else None)))

    def finish(self) -> None:
        while self.announcements:
            peer, name, work = self.announcements.popleft()
            with self._connected(peer, ""):
                self.communicator.wait(peer, work, name)
        while self.pending:
            peer, name, event = self.pending.popleft()
            self.communicator.poll(peer, name, event.query)
            self.events.append(event)
        self.is_launching = False
        self.communicator.check_verdict()
        self.communicator.flush()

    def abort(self) -> None:
        self.is_launching = False
        self.pending.clear()
        links = [*self.links.values()]
        self.links.clear()
        for link in links:
            link.abort()


def _as_agreed(
    payload: torch.Tensor | None, now: MessageLayout, known: MessageLayout, name: str
) -> torch.Tensor | None:
    """Return the payload with the agreed strides. Raises PlanError if anything else differs."""
    is_alike = (now.kind, now.shape, now.dtype, now.requires_grad) == (
        known.kind, known.shape, known.dtype, known.requires_grad,
    )  # fmt: skip
    if not is_alike or payload is None:
        raise PlanError(
            f"{name} is {_text(now)}, and was {_text(known)} in a step before",
            why="ranks on GPUs agree on the layout of a value once, and the other rank has begun to receive it",
            hint="pin= or keep_together=, so that the value stays on one rank",
        )
    return torch.empty_strided(known.shape, known.strides, dtype=known.dtype, device=payload.device).copy_(payload)


def _text(layout: MessageLayout) -> str:
    if layout.kind is not PayloadKind.TENSOR:
        return "None" if layout.kind is PayloadKind.NOTHING else "an object"
    return f"{layout.dtype} {tuple(layout.shape)}{' with a gradient' * layout.requires_grad}"
