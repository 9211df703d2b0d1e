"""The status board: entries in the store of `torch.distributed` that all ranks of a mesh read and write.

It has the texts that ranks exchange and compare, the report of the first failure, and the message that each rank waits for. Its
keys are listed in `protocol`. Calls on the store fail with RuntimeError when the process that hosts it is gone; then a
read finds nothing and a write has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep

from torch.distributed.distributed_c10d import Store

from pipecompile.distributed.failures.absences import Absences
from pipecompile.distributed.failures.awake_clock import awake
from pipecompile.distributed.failures.board_watch import PATIENCE, POLL
from pipecompile.distributed.failures.exits_before_compile import early_end
from pipecompile.distributed.failures.failure_report import (
    AwaitedMessage,
    CopyDisagreement,
    Disagreement,
    FailureReport,
    RankLost,
    ranks_of_texts,
)
from pipecompile.distributed.failures.process_end import has_ended, identity, note_end
from pipecompile.distributed.protocol import ENDED, EXCHANGE, EXCHANGE_BEGUN, FAILED, PROCESS, READERS, STAYS, WAITS
from pipecompile.errors import PlanError
from pipecompile.parameters.save_attendance import RankMissing

__all__ = ["StatusBoard"]

_READ_TIMEOUT = 10.0
"""Seconds that a failing rank waits for the others to read its report."""

_OWN_RUNS = 1 << 32
"""Number of runs that a copy of the pipeline can make between two runs of all members."""

_ALL = -1
"""In the keys of exchanges of all members, the place of the first rank of a copy."""


@dataclass(slots=True)
class _Exchanges:
    """The exchanges of texts among `ranks`, with `first` in their keys: their `count`, and the count in the present run."""

    ranks: tuple[int, ...]
    first: int
    count: int = 0
    of_step: int = 0


class StatusBoard:
    """The board as rank `rank`, one of `members`, sees it. `timeout` is in seconds.

    `copy` are the members that run one copy of the pipeline, all of them by default. They may make calls without the other
    copies: `step` counts the runs of all members by `_OWN_RUNS`, and by 1 those of a copy in between.
    """

    def __init__(
        self, store: Store, members: Sequence[int], rank: int, timeout: float, copy: Sequence[int] = ()
    ) -> None:
        self.store, self.members, self.rank, self.timeout = store, tuple(members), rank, timeout
        self.copy, self.step = tuple(copy) or self.members, 0
        self.absences: Absences | None = None
        self._seen_ahead: dict[int, tuple[str, float]] = {}  # of each awaited rank: its exchange, and since when
        self._all, self._own = _Exchanges(self.members, _ALL), _Exchanges(self.copy, min(self.copy))
        with suppress(RuntimeError):
            self.store.set(PROCESS.at(rank), identity())
        note_end(partial(store.set, ENDED.at(rank)))

    def begin(self, *, in_copy: bool = False) -> None:
        """Count a new run: of all members, or `in_copy`, of this copy of the pipeline alone."""
        self.step = self.step + 1 if in_copy else (self.step // _OWN_RUNS + 1) * _OWN_RUNS
        self._all.of_step = self._own.of_step = 0

    def _exchanges(self, *, in_copy: bool) -> _Exchanges:
        return self._own if in_copy and self.copy != self.members else self._all

    # -- exchange of texts --------------------------------------------------------------------------------------------

    def all_gather_text(self, topic: str, text: str, *, in_copy: bool = False) -> list[str]:
        """Return the texts of all members, or of those of this copy, in their order. Each must call this with the same topic.

        Raises Disagreement, on all of them, for different topics, and RankLost for a member that does not come in time.
        """
        among = self._exchanges(in_copy=in_copy)
        among.count += 1
        self.store.set(EXCHANGE_BEGUN.at(self.rank), f"{among.first} {self.step} {among.of_step} {topic}")
        among.of_step, at = among.of_step + 1, (among.first, among.count)
        self.store.set(EXCHANGE.at(*at, among.ranks.index(self.rank)), f"{topic}\n{text}")
        entries = [self._read(EXCHANGE.at(*at, index), rank) for index, rank in enumerate(among.ranks)]
        topics = [entry.partition("\n")[0] for entry in entries]
        if len(set(topics)) > 1:
            raise self._disagreement(among, topics, "what to do next")
        return [entry.partition("\n")[2] for entry in entries]

    def agree(self, topic: str, text: str, *, in_copy: bool = False) -> None:
        """Raise Disagreement, on all members, or on those of this copy, unless all have the same text."""
        texts = self.all_gather_text(topic, text, in_copy=in_copy)
        if len(set(texts)) > 1:
            raise self._disagreement(self._exchanges(in_copy=in_copy), texts, f"the {topic}")

    def _disagreement(self, among: _Exchanges, texts: Sequence[str], topic: str) -> PlanError:
        """Return the error that names who has what. If this copy alone raises it, it is a failure to post for the others."""
        return (Disagreement if among is self._all else CopyDisagreement)(
            f"the ranks disagree about {topic}",
            where=ranks_of_texts(among.ranks, texts),
            why="every rank runs its part of one program",
            hint="the same model, options, mode and batch on every rank",
        )

    def _read(self, key: str, rank: int) -> str:
        start = looked = awake()
        pause = 0.002
        while not self.store.check([key]):
            if (report := self.failed()) is not None:
                raise RankLost(report, is_posted=True)
            if awake() - looked > POLL:
                self.look_for_ended(key)
                looked = awake()
            if awake() - start > self.timeout:
                raise RankLost(self._late(rank), is_posted=False)
            sleep(pause)
            pause = min(2 * pause, 0.1)
        return str(self.store.get(key).decode())

    def _late(self, rank: int) -> FailureReport:
        """Return the failure of a rank that does not come to an exchange, or of the one that it waits for."""
        root, name = self.root_of_wait(rank, "")
        if root not in (rank, self.rank):
            what = f"it did not send {name} within {self.timeout:.3g} s, for which rank {rank} waits"
            return FailureReport(root, self.cause(root, self.with_reason(root, what)), action="before an exchange")
        what = f"it did not take part in the exchange before a program within {self.timeout:.3g} s"
        made = self.absences.of_exchange(rank) if self.absences is not None else ""
        return FailureReport(rank, self.with_reason(rank, "; ".join(filter(None, [what, made]))))

    def with_reason(self, rank: int, what: str) -> str:
        """Return `what` is said of a rank that does not come, with what it has noted about itself."""
        reason = self.absences.of_wait(rank) if self.absences is not None else ""
        return "; ".join(filter(None, [what, reason]))

    def note_thread(self, name: str, error: BaseException) -> None:
        """Note that an exception has ended a thread of this rank."""
        if self.absences is not None:
            self.absences.note_thread(name, error)

    def note_save(self, path: str) -> None:
        """Note that this rank saves a checkpoint; with "", that it does so no longer."""
        if self.absences is not None:
            self.absences.note_save(path)

    def look_for_ended(self, awaited: str = "") -> None:
        """Raise RankLost for a member that has ended, unless the `awaited` key is there meanwhile."""
        for rank in self.members:
            if cause := self.cause(rank, ""):
                sleep(POLL)  # time for a report of its own
                posted = self.failed()
                if awaited and posted is None and self.store.check([awaited]):
                    return
                report = posted or FailureReport(rank, cause, action="before an exchange")
                raise RankLost(report, is_posted=posted is not None)

    def cause(self, rank: int, otherwise: str) -> str:
        """Return how the script or, on this host, the process of a rank has ended; `otherwise` if neither has, as far as is known."""
        with suppress(RuntimeError):
            if self.store.check([ENDED.at(rank)]):
                return self.store.get(ENDED.at(rank)).decode()
            if not self.store.check([PROCESS.at(rank)]):
                return early_end(rank) or otherwise
            if has_ended(self.store.get(PROCESS.at(rank)).decode()):
                return "its process has ended, and reported no error: it was killed, or left by os._exit"
        return otherwise

    # -- failures -----------------------------------------------------------------------------------------------------

    def check(self, awaited: int | None = None) -> None:
        """Raise RankLost if a rank has failed, or if this rank waits for `awaited`, which waits in an exchange for this rank.

        The latter must last for PATIENCE seconds: the message from `awaited` may be under way.
        """
        if (report := self.failed()) is not None:
            raise RankLost(report, is_posted=True)
        if awaited is not None:
            rank, _ = self.root_of_wait(awaited, "")
            exchange = self._ahead(rank)
            seen, since = self._seen_ahead.get(awaited, ("", 0.0))
            if not exchange or exchange != seen:
                self._seen_ahead[awaited] = exchange, awake()
            elif awake() - since >= PATIENCE:
                topic = exchange.split(" ", 3)[3]
                what = f"it and rank {self.rank} were asked for different things: it exchanges {topic}"
                raise RankLost(FailureReport(rank, what, action="beside other calls"), is_posted=False)

    def _ahead(self, rank: int) -> str:
        """Return the exchange in which a rank waits for this rank, which has not begun it in this run; "" for none."""
        with suppress(RuntimeError):
            if rank != self.rank and self.store.check([EXCHANGE_BEGUN.at(rank)]):
                exchange = self.store.get(EXCHANGE_BEGUN.at(rank)).decode()
                places = (f"{one.first} {self.step} {one.of_step} " for one in (self._all, self._own))
                return exchange if exchange.startswith(tuple(places)) else ""
        return ""

    def failed(self) -> FailureReport | None:
        """Return the report of the rank that failed first, if one failed."""
        with suppress(RuntimeError):
            if self.store.check([FAILED.at()]):
                return FailureReport.from_json(self.store.get(FAILED.at()))
        return None

    def post_failure(self, report: FailureReport) -> FailureReport:
        """Post a report unless there is one already; return the one that is posted. A rank that posts its own failure does not go on."""
        try:
            if report.rank == self.rank:
                self.store.set(STAYS.at(self.rank), "no")
            return FailureReport.from_json(self.store.compare_set(FAILED.at(), "", report.to_json()))
        except RuntimeError:
            return report

    def report_outside(self, error: BaseException) -> bool:
        """Post an exception outside all calls, unless a rank failed before, all raise it, or it is of another rank; return whether."""
        if isinstance(error, (Disagreement, RankMissing)):
            return False
        report = FailureReport.outside(error, self.rank, has_copies=self.copy != self.members)
        if self.post_failure(report) == report:
            return True
        self.confirm_read()
        return False

    def _count_ended(self) -> int:
        return sum(bool(self.cause(rank, "")) for rank in self.members if rank != self.rank)

    def confirm_read(self) -> None:
        """Count this rank among the readers of the report."""
        with suppress(RuntimeError):
            self.store.add(READERS.at(), 1)

    def wait_for_readers(self, error: BaseException | None = None, since: float | None = None) -> None:
        """Wait until all other members that run have read the report, for a limited time from `since` on; less after Ctrl-C."""
        limit = _READ_TIMEOUT if error is None or isinstance(error, Exception) else 2 * POLL
        end = (monotonic() if since is None else since) + min(limit, self.timeout)
        with suppress(RuntimeError):
            while monotonic() < end and self.store.add(READERS.at(), 0) < len(self.members) - 1 - self._count_ended():
                sleep(0.05)

    # -- waits --------------------------------------------------------------------------------------------------------

    def post_wait(self, rank: int, name: str) -> None:
        """Post that this rank waits for value `name` from `rank`."""
        with suppress(RuntimeError):
            self.store.set(WAITS.at(self.rank), AwaitedMessage(rank, name, self.step).to_json())

    def clear_wait(self) -> None:
        """Post that this rank does not wait. The key is kept: `get` of a key that was deleted after `check` would block."""
        with suppress(RuntimeError):
            self.store.set(WAITS.at(self.rank), "")

    def wait_of(self, rank: int) -> AwaitedMessage | None:
        """Return the message that a rank waits for, if it has posted one."""
        with suppress(RuntimeError):
            if self.store.check([WAITS.at(rank)]) and (text := self.store.get(WAITS.at(rank))):
                return AwaitedMessage.from_json(text)
        return None

    def root_of_wait(self, rank: int, name: str) -> tuple[int, str]:
        """Follow the posted waits from `rank`, from which `name` is awaited, to a rank that does not wait itself.

        Return that rank and the value that it owes. A cycle of waits ends at the first rank met twice, or at this rank.
        """
        seen = {self.rank}
        while rank not in seen and (wait := self.wait_of(rank)) is not None:
            seen.add(rank)
            rank, name = wait.rank, wait.name
        return rank, name

    def awaited_from(self, rank: int, own: str) -> set[str]:
        """Return the names of the values that are awaited from `rank`, by this rank (`own`) and others, in the earliest step."""
        waits = [wait for wait in map(self.wait_of, self.members) if wait is not None and wait.rank == rank]
        first = min((wait.step for wait in waits), default=self.step)
        return {wait.name for wait in waits if wait.step == first} | ({own} if first >= self.step else set())
