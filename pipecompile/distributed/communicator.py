"""The communicator of the ranks of one pipeline: messages between two ranks, and the status board that all ranks read.

    rank 0 ◄── mailboxes ──► rank 1 ◄── mailboxes ──► rank 2      values, in the order of the program
       │                        │                        │
       └──────────── store of torch.distributed ─────────┘        agreement on the program, failures, waits

A rank waits for a message inside c10d. Meanwhile a thread checks the status board every half second. If a rank failed, or was
silent for the timeout of the process group, the thread breaks the connections of this rank. That ends the wait of this rank, and
the waits of its peers for this rank.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from threading import main_thread
from time import sleep
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipecompile.distributed.agreement.compile_settings import check_settings
from pipecompile.distributed.data_parallel.left_groups import require_present
from pipecompile.distributed.failures.absences import Absences
from pipecompile.distributed.failures.awake_clock import awake
from pipecompile.distributed.failures.board_watch import PATIENCE, POLL, PendingWait, watch
from pipecompile.distributed.failures.failure_guard import FailureGuard
from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.failures.posted_wait import PostedWait
from pipecompile.distributed.failures.process_end import report_uncaught, require_process
from pipecompile.distributed.failures.save_reports import SaveReports
from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.distributed.failures.unopened_groups import GroupNotOpened, lost_at_opening
from pipecompile.distributed.messages.mailboxes import Channel, Inbox, Outbox
from pipecompile.distributed.messages.own_groups import GroupUse
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.parameters.save_attendance import explain_by
from pipecompile.tracing.state.signal_errors import is_from_handler

__all__ = ["Communicator"]

_WAIT_TIMEOUT = timedelta(days=30)
"""Timeout of a wait in c10d: the thread that checks the status board ends a wait long before."""

_POLL_WORK = 0.0001
"""Seconds between two looks at what a GPU receives."""

_CREATED: Counter[tuple[int, ...]] = Counter()
"""Number of communicators that this process has created, per members: all ranks create them in the same order."""


class Communicator:
    """The communicator of one pipeline, as one rank has it. A peer is a pipeline device, `rank` a rank of `torchrun`.

    `guard` has the failure that ended it. `renewals` counts how often it went on with fewer copies of the pipeline.
    """

    def __init__(self, ranks: RankMesh) -> None:
        self.ranks, self.rank, self.timeout = ranks, ranks.rank, ranks.timeout
        require_present(ranks.members)
        self.groups = GroupUse(ranks)  # raises before the pipeline counts
        self.number = _CREATED[ranks.members] = _CREATED[ranks.members] + 1
        self._process = os.getpid()
        self.settings: Callable[[], str] = str  # what all ranks must have in common
        self.breakers: list[Callable[[], None]] = []  # called when the connections are to be broken
        self.renewals = 0
        self._successors: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._enter(ranks.store(self.number))

    def _enter(self, store: Store) -> None:
        """Begin with a new board in this part of the store, without connections and failures."""
        ranks = self.ranks
        self.board = StatusBoard(store, ranks.members, self.rank, self.timeout, ranks.copy)
        self.board.absences = Absences(ranks.store(0), ranks.members, self.rank, self.number)
        self.board.absences.begin()
        self._reports = SaveReports(self.board)  # of this board alone: a save does not fail for the losses before
        explain_by(self._reports)
        self.guard = FailureGuard(self.board, ranks, self._break)
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self.is_connected = False
        self._waiting: PendingWait | None = None
        self._seen: PendingWait | None = None  # the wait at the last check
        self._posted = PostedWait(self.board, ranks, lambda: self._waiting)
        self._verdict: RankLost | None = None  # why the checking thread broke the connections
        report_uncaught(self.board)

    # -- fewer copies -------------------------------------------------------------------------------------------------

    def renew(self, ranks: RankMesh) -> None:
        """Continue with the `ranks` of the remaining copies, on a new board and new connections. All of them call this together."""
        self.groups.drop()
        _CREATED[ranks.members] = max(_CREATED[ranks.members], _CREATED[self.ranks.members])
        self.ranks, self.renewals = ranks, self.renewals + 1
        self._enter(PrefixStore(f"left/{'-'.join(map(str, ranks.left))}", self.board.store))

    def replace_group(self, group: dist.ProcessGroup) -> None:
        """Replace the replica group by one of the remaining ranks."""
        before = self.ranks.replica_group
        assert before is not None
        self._successors = dict.fromkeys((*self._successors, before), group)
        self.ranks = replace(self.ranks, replica_group=group)
        self.groups = GroupUse(self.ranks)

    def current(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the group that has taken the place of a group of the mesh, or that group itself."""
        return self._successors.get(group, group)

    # -- messages -----------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open channels to all peers, before the first message. All ranks must call this together."""
        if not self.is_connected:
            opening = f"{int(self.groups.is_open)}{self.settings()}"
            texts = self.all_gather_text("messages to come", opening)
            check_settings([text[1:] for text in texts], self.ranks.members)
            backend, use = self._open(is_new=any(text.startswith("0") for text in texts))
            for peer in (peer for peer in range(self.ranks.size) if peer != self.ranks.index):
                channel = Channel(backend, peer, use, partial(self.wait, peer))
                self._outboxes[peer], self._inboxes[peer] = Outbox(channel), Inbox(channel)
            self.is_connected = True
            watch(self)

    def _open(self, *, is_new: bool) -> tuple[Any, int]:
        """Return the c10d backend for messages, and the number of this use of it. Raises RankLost."""
        try:
            return self.groups.opened(self.board.store, is_new=is_new)
        except GroupNotOpened as failed:
            raise lost_at_opening(self.board, failed) from None

    def _forget_connections(self) -> None:
        """Let the next call open channels anew, if another pipeline of these ranks has failed and closed them."""
        if self.is_connected and self.groups.is_stale:
            self.is_connected = False
            self._outboxes.clear()
            self._inboxes.clear()

    def expect(self, source: int, names: Iterable[str]) -> None:
        """Append names to the values that will come from `source`, in this order."""
        self._inboxes[source].expect(names)

    def send(self, target: int, name: str, value: Any, *, once: bool = False) -> None:
        """Begin to send a value, which must not change until `flush`. Raises RankLost.

        With `once`, the layout is not remembered, and the target calls `receive` with `once` instead of `expect`.
        """
        try:
            self._outboxes[target].send(name, value, once=once)
        except RuntimeError as error:
            raise self.connection_lost(target, "", error) from None

    def receive(self, source: int, name: str, *, once: bool = False) -> Any:
        """Return the next value from `source`. Raises RankLost, also if the value has another name."""
        inbox = self._inboxes[source]
        try:
            value = inbox.receive_once(name) if once else inbox.receive(name)
            self._outboxes[source].release(inbox.acknowledged)
        except (RuntimeError, ConnectionError) as error:
            raise self.connection_lost(source, name, error) from None
        return value

    def flush(self) -> None:
        """Return when all values are sent and may change. Raises RankLost."""
        for target, outbox in self._outboxes.items():
            try:
                outbox.flush()
            except RuntimeError as error:
                raise self.connection_lost(target, "", error) from None

    def channel(self, peer: int) -> Channel:
        """Return the channel to a peer. Messages of tag LAYOUT are not those of `send` and `receive`."""
        return self._inboxes[peer].channel

    def wait(self, peer: int, work: dist.Work, name: str) -> None:
        """Wait inside c10d for the end of a send or receive. A failure elsewhere ends the wait with RuntimeError."""
        self._waiting = PendingWait(peer, name)
        try:
            work.wait(_WAIT_TIMEOUT)
        finally:
            self._waiting = None
            self._posted.leave()
        self._posted.clear()  # after a failure the wait stays posted: other ranks may need it to name the cause

    def poll(self, peer: int, name: str, is_over: Callable[[], bool]) -> None:
        """Wait for a value that moves without this thread, as a GPU receives it. Raises RankLost."""
        self._waiting = PendingWait(peer, name)
        try:
            while not is_over() and self._verdict is None:
                sleep(_POLL_WORK)
            self.check_verdict()  # what is aborted is over as well
        finally:
            self._waiting = None
            self._posted.leave()
        self._posted.clear()

    def connection_lost(self, peer: int, name: str, error: Exception) -> RankLost:
        """Return the reason why value `name` does not come, or, with an empty name, why a value cannot be sent."""
        if is_from_handler(error):
            raise error
        if (lost := self._verdict or self._posted.crossed(self.ranks.rank_of(peer))) is not None:
            return lost.anew()
        if not name:
            sleep(POLL)  # a rank that waits for a value of that peer can name the value
        reason = str(error).partition("\n")[0]
        if not isinstance(error, ConnectionError):
            reason = f"the connection to it is gone: {reason}"
        return self._lost(peer, reason, name)

    def _lost(self, peer: int, what: str, name: str, *, is_late: bool = False) -> RankLost:
        with suppress(RuntimeError):
            sleep(PATIENCE if is_late and self.ranks.tensor_group else POLL)  # others may know more
            if (report := self.board.failed()) is not None:
                return RankLost(report, is_posted=True)
        rank, name = self.board.root_of_wait(self.ranks.rank_of(peer), name)
        cause = self.board.cause(rank, self.board.with_reason(rank, what) if is_late else what)
        report = FailureReport(rank, cause, awaited=name)
        return RankLost(report, is_posted=False, is_late=is_late)

    # -- while this rank waits ----------------------------------------------------------------------------------------

    def check_wait(self) -> None:
        """Break the connections if the current wait cannot end. The watch thread calls this every `POLL` seconds.

        A wait is checked from its second call on, so that short waits cost nothing.
        """
        wait = self._waiting
        if wait is None or wait is not self._seen:
            self._seen = wait
            if wait is not None:
                wait.since = awake()
            return
        try:
            self.check(self.ranks.rank_of(wait.peer))
            self._posted.post(wait)
            if cause := self.board.cause(self.ranks.rank_of(wait.peer), ""):
                raise self._lost(wait.peer, cause, wait.name)  # a child of it may hold its connections open
            if awake() - wait.since > self.timeout:
                silent = f"it has been silent for {self.timeout:.3g} s"
                raise self._lost(wait.peer, silent, wait.name, is_late=True)
        except RankLost as lost:
            if self._waiting is wait:
                self.give_up(lost)

    def interrupt(self) -> None:
        """End a wait of the main thread, which raises KeyboardInterrupt after it."""
        if (wait := self._waiting) is not None and wait.thread == main_thread().ident:
            self.give_up(RankLost(FailureReport(self.rank, "KeyboardInterrupt"), is_posted=False))

    def give_up(self, lost: RankLost) -> None:
        """End all waits of this rank, which raise `lost`."""
        self._verdict = lost.anew()
        self._break()

    def check_verdict(self) -> None:
        """Raise RankLost after `give_up`."""
        if self._verdict is not None:
            raise self._verdict.anew()

    def _break(self) -> None:
        """End all waits in the connections of this rank: gloo closes all of them when one receive times out."""
        self.groups.drop()
        for breaker in self.breakers:
            breaker()
        if (channel := next((inbox.channel for inbox in self._inboxes.values()), None)) is not None:
            channel.abort()

    # -- agreement and failures ---------------------------------------------------------------------------------------

    def begin(self, *, in_copy: bool = False) -> None:
        """Begin a run of all members, or of this copy only. Raises RunError after a failure: messages under way are lost."""
        self.require_process()
        self.guard.require_whole()
        self._forget_connections()
        self.board.begin(in_copy=in_copy)

    def require_process(self) -> None:
        """Raise InputError in a process forked from this rank."""
        require_process(self._process, self.rank)

    def all_gather_text(self, topic: str, text: str, *, in_copy: bool = False) -> list[str]:
        """Return the texts of all members, or of this copy's. Raises Disagreement for different topics, RankLost for a silent member."""
        return self.board.all_gather_text(topic, text, in_copy=in_copy)

    def agree(self, topic: str, text: str, *, in_copy: bool = False) -> None:
        """Raise Disagreement, on all ranks, or on those of this copy, unless all have the same text."""
        self.board.agree(topic, text, in_copy=in_copy)

    def check(self, awaited: int | None = None) -> None:
        """Raise RankLost if a rank has failed, or if `awaited`, a rank that this one waits for, waits for another call of this one."""
        self.board.check(awaited)

    def guarded(self) -> AbstractContextManager[None]:
        """Post a failure in this context for all ranks; raise the failure of another rank as RunError."""
        return self.guard.guarded()
