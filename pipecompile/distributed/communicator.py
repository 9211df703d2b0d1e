"""What connects the ranks of a pipeline: messages between two of them, and a board where all can read.

    rank 0 ◄── boxes ──► rank 1 ◄── boxes ──► rank 2      values, in the order of the program
       │                    │                    │
       └──────── the store of torch.distributed ─┘        what all must agree on; who failed; who waits for whom

A rank waits for a message inside c10d. Meanwhile a thread of it looks at the board: if a rank failed, or was silent for the
timeout of the process group, it breaks the connections of this rank, which ends the wait, and that of its peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from pipecompile.distributed.blame import Disagreement, FailureReport, RankLost
from pipecompile.distributed.board_watch import POLL, watch
from pipecompile.distributed.mailboxes import Channel, Inbox, Outbox
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.distributed.status_board import StatusBoard
from pipecompile.errors import RunError
from pipecompile.torch_private.process_groups import cpu_backend

__all__ = ["Communicator"]

_PATIENCE = timedelta(days=30)
"""How long c10d may wait; who watches the board ends it before."""

_MADE: Counter[tuple[int, ...]] = Counter()

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Per group of ranks one that only values go through: what breaks it harms nothing else."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingWait:
    """For a message of this name, to or from `peer`, from the moment `since`."""

    peer: int
    name: str
    since: float


class Communicator:
    """Peers are numbered as pipeline devices."""

    def __init__(self, ranks: RankMesh) -> None:
        self.ranks, self.rank, self.timeout = ranks, dist.get_rank(), ranks.timeout
        self.number = _MADE[ranks.members] = _MADE[ranks.members] + 1
        self.board = StatusBoard(ranks, self.rank, self.number)
        self.action = ""
        self._broken: RunError | None = None
        self._group: dist.ProcessGroup | None = None
        self._out: dict[int, Outbox] = {}
        self._in: dict[int, Inbox] = {}
        self._waiting: PendingWait | None = None
        self._seen: PendingWait | None = None
        self._is_shown, self._lock = False, Lock()
        self._verdict: RankLost | None = None

    # -- messages -----------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Before the first message, on all ranks together."""
        if self._group is None:
            self.agree("messages to come", "values of the pipeline")
            if self.ranks.group not in _GROUPS:
                members = [self.ranks.rank_of(peer) for peer in range(self.ranks.size)]
                group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
                assert isinstance(group, dist.ProcessGroup)
                _GROUPS[self.ranks.group] = group
            self._group = _GROUPS[self.ranks.group]
            backend = cpu_backend(self._group)
            for peer in range(self.ranks.size):
                if peer != self.ranks.index:
                    address = dist.get_group_rank(self._group, self.ranks.rank_of(peer))
                    channel = Channel(backend, address, 3 * self.number, partial(self._wait, peer))
                    self._out[peer], self._in[peer] = Outbox(channel), Inbox(channel)
            watch(self)

    def expect(self, source: int, names: Iterable[str]) -> None:
        """These values will come from `source`, in this order. Raises RankLost."""
        try:
            self._in[source].expect(names)
        except RuntimeError as error:
            raise self._gone(source, "", error) from None

    def send(self, target: int, name: str, value: Any, *, once: bool = False) -> None:
        """Hand a value over; it must stay as it is until `flush`. `once`: nobody was told to expect it. Raises RankLost."""
        try:
            self._out[target].put(name, value, once=once)
        except RuntimeError as error:
            raise self._gone(target, "", error) from None

    def take(self, source: int, name: str, *, once: bool = False) -> Any:
        """The next value from `source`, which must be the one called so. Raises RankLost."""
        box = self._in[source]
        try:
            value = box.take_once(name) if once else box.take(name)
            self._out[source].taken(box.told)
        except (RuntimeError, ConnectionError) as error:
            raise self._gone(source, name, error) from None
        return value

    def flush(self) -> None:
        """Return when all that was sent is on its way, and may be changed. Raises RankLost."""
        for target, box in self._out.items():
            try:
                box.flush()
            except RuntimeError as error:
                raise self._gone(target, "", error) from None

    def _wait(self, peer: int, work: dist.Work, name: str) -> None:
        self._waiting = PendingWait(peer, name, monotonic())
        try:
            work.wait(_PATIENCE)
        finally:
            self._waiting = None
        if self._is_shown:  # what did not come stays on the board: others may have to know
            self._hide()

    def _gone(self, peer: int, name: str, error: Exception) -> RankLost:
        """Why a message of this name does not come, or one does not go."""
        if self._verdict is not None:
            return self._verdict
        if not name:
            sleep(POLL)  # who waits for something of that rank, can say for what
        reason = str(error).partition("\n")[0]
        return self._lost(
            peer, reason if isinstance(error, ConnectionError) else f"the connection to it is gone: {reason}", name
        )

    def _lost(self, peer: int, what: str, name: str) -> RankLost:
        with suppress(RuntimeError):
            sleep(POLL)  # who knows more, has told it by then
            if (report := self.board.failed()) is not None:
                return RankLost(report, is_told=True)
        rank, name = self.board.to_blame(self.ranks.rank_of(peer), name)
        return RankLost(FailureReport(rank, what, where=f"{name} was to come from it" if name else ""), is_told=False)

    # -- while this rank waits ----------------------------------------------------------------------------------------

    def glance(self) -> None:
        """By the thread that watches, every half second: end a wait for what will not come."""
        wait = self._waiting
        if wait is None or wait is not self._seen:
            self._seen = wait
            return
        try:
            self.look()
            self._show(wait)
            if monotonic() - wait.since > self.timeout:
                raise self._lost(wait.peer, f"it has been silent for {self.timeout:.3g} s", wait.name)
        except RankLost as lost:
            if self._waiting is wait:
                self._verdict = lost
                self._break()

    def _show(self, wait: PendingWait) -> None:
        """Let others read for whom this rank waits, unless it does not any more."""
        with self._lock:
            if not self._is_shown:
                self._is_shown = True
                if self._waiting is wait:
                    self.board.say_wait(self.ranks.rank_of(wait.peer), wait.name)

    def _hide(self) -> None:
        with self._lock:
            self._is_shown = False
            self.board.unsay_wait()

    def _break(self) -> None:
        """End what waits in the connections of this rank: gloo gives all of them up when one receive takes too long."""
        _GROUPS.pop(self.ranks.group, None)
        channel = next((box.channel for box in self._in.values()), None)
        if channel is not None:
            with suppress(RuntimeError):
                part = torch.empty(1, dtype=torch.uint8, device="cpu")
                channel.backend.recv([part], channel.peer, 3 * self.number + 2).wait(timedelta(milliseconds=1))

    # -- the board ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A run begins. Raises RunError after a failure: what was under way then is lost."""
        if self._broken is not None:
            raise RunError(
                "this pipeline failed before",
                stage=self._broken.stage,
                microbatch=self._broken.microbatch,
                why=self._broken.what,
                hint="start the ranks again, from the last checkpoint",
            )
        self.board.begin()

    def all_gather_text(self, topic: str, text: str) -> list[str]:
        """What every member says to a topic. Raises Disagreement when one is asked something else, RankLost when one is silent."""
        return self.board.all_gather_text(topic, text)

    def agree(self, topic: str, text: str) -> None:
        """Raise Disagreement, on all ranks, unless all say the same."""
        self.board.agree(topic, text)

    def look(self) -> None:
        """Raise RankLost when a rank failed, or asks for something that this one is not asked for."""
        self.board.look()

    def wanted(self, rank: int, own: str) -> set[str]:
        """What is to come from a rank: `own` to this one, and what others wait for; of several steps, in the earliest."""
        return self.board.wanted(rank, own)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails here is told to all ranks; what failed elsewhere is raised as RunError."""
        try:
            yield
        except Disagreement:
            raise
        except RankLost as lost:
            report = lost.report if lost.is_told else self.board.tell(lost.report)
            self.board.heard()
            self._broken = report.error()
            self._break()
            raise self._broken from None
        except Exception as error:
            report = FailureReport.of(error, self.rank, self.action)
            self._broken = report.error()
            if self.board.tell(report) == report:
                self.board.wait_for_hearers()
            else:
                self.board.heard()
            self._break()
            raise
        finally:
            self.action = ""
