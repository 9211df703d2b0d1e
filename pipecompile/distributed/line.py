"""What connects the ranks of a pipeline: messages between two of them, and a board where all can read.

    rank 0 ◄── boxes ──► rank 1 ◄── boxes ──► rank 2      values, in the order of the program
       │                    │                    │
       └──────── the store of torch.distributed ─┘        what all must agree on; who failed; who waits for whom

Nobody waits without looking at the board: a rank that fails is known to all within a second, one that is silent after the
timeout of the process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from pipecompile.distributed.boxes import Inbox, Outbox
from pipecompile.distributed.parcels import mark_of, opened, packed
from pipecompile.distributed.ranks import Ranks
from pipecompile.distributed.reports import Disagreement, Lost, Report
from pipecompile.errors import PipecompileError, RunError

__all__ = ["Line"]

_POLL = 0.5
"""Seconds between two looks at the board while a rank waits."""

_GRACE = 10.0
"""Seconds that a failing rank gives the others to hear of it."""

_MADE: Counter[tuple[int, ...]] = Counter()


class Line:
    """Peers are numbered as pipeline devices."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rank = ranks, dist.get_rank()
        number = _MADE[ranks.members] = _MADE[ranks.members] + 1
        name = "-".join(map(str, ranks.members))
        self.store = PrefixStore(f"pipecompile/{name}/{number}", _get_default_store())
        self.tag = number
        self.timeout = ranks.timeout
        self.action = ""
        self.step = self._asked = self._rounds = 0
        self._broken: RunError | None = None
        self._out: dict[int, Outbox] = {}
        self._in: dict[int, Inbox] = {}

    # -- messages -----------------------------------------------------------------------------------------------------

    def expect(self, source: int, count: int) -> None:
        """So many messages will come from `source`."""
        if source not in self._in:
            self._in[source] = Inbox(self.ranks.group, source, self.tag)
        if count:
            self._in[source].expect(count)

    def send(self, target: int, name: str, value: Any) -> None:
        """Hand a value over; it must stay as it is until `flush`."""
        self._outbox(target).put(packed(mark_of(name), value))

    def _outbox(self, target: int) -> Outbox:
        if target not in self._out:
            self._out[target] = Outbox(self.ranks.group, target, self.tag)
        return self._out[target]

    def take(self, source: int, name: str) -> Any:
        """The next value from `source`, which must be the one called so. Raises Lost."""
        got = self._next(source, name)
        if isinstance(got, Exception):
            raise self._lost(source, _silence(got), name)
        header, content = got
        if int(header[0]) != mark_of(name):
            raise self._lost(source, "it sent another value: the ranks are not in the same step", name)
        return opened(header, content)

    def flush(self) -> None:
        """Return when all that was sent is on its way, and may be changed. Raises Lost."""
        start = monotonic()
        for target, box in self._out.items():
            while not box.is_through(_POLL):
                self.look()
                if monotonic() - start > self.timeout:
                    raise self._lost(target, f"it took nothing for {self.timeout:.3g} s")

    def _next(self, source: int, name: str) -> Any:
        """A message, or the exception that there is none. While a rank waits, others can read for whom."""
        queue, start, is_told = self._in[source].queue, monotonic(), False
        while True:
            with suppress(Empty):
                got = queue.get(timeout=_POLL)
                break
            self.look()
            if not is_told:
                self._try_set(f"waits/{self.rank}", Report(self.ranks.rank_of(source), name).to_json())
                is_told = True
            if monotonic() - start > self.timeout:
                return TimeoutError(f"it has been silent for {self.timeout:.3g} s")
        if is_told and not isinstance(got, Exception):
            with suppress(RuntimeError):
                self.store.delete_key(f"waits/{self.rank}")
        return got

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
        self.step, self._asked = self.step + 1, 0

    def gathered(self, topic: str, text: str) -> list[str]:
        """What every member says to a topic. Raises Disagreement when one is asked something else, Lost when one is silent."""
        place, count = self.ranks.place, len(self.ranks.members)
        self._rounds += 1
        self.store.set(f"ask/{self.step}/{self._asked}", "")
        self._asked += 1
        self.store.set(f"round/{self._rounds}/{place}", f"{topic}\n{text}")
        said = [self._read(f"round/{self._rounds}/{member}", member) for member in range(count)]
        topics = [words.partition("\n")[0] for words in said]
        if len(set(topics)) > 1:
            self.disagree(topics, "what to do next")
        return [words.partition("\n")[2] for words in said]

    def agree(self, topic: str, text: str) -> None:
        """Raise Disagreement, on all ranks, unless all say the same."""
        said = self.gathered(topic, text)
        if len(set(said)) > 1:
            self.disagree(said, topic)

    def disagree(self, said: list[str], topic: str) -> None:
        by_text: dict[str, list[str]] = {}
        for rank, text in zip(self.ranks.members, said, strict=True):
            by_text.setdefault(text, []).append(str(rank))
        where = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in by_text.items())
        raise Disagreement(
            f"the ranks disagree about the {topic}",
            where=where,
            why="every rank runs its part of one program",
            hint="the same model, options, mode and batch on every rank",
        )

    def look(self) -> None:
        """Raise Lost when a rank failed, or asks for something that this one is not asked for."""
        for box in self._out.values():
            if box.error:
                target = next(peer for peer, other in self._out.items() if other is box)
                raise self._lost(target, _silence(box.error[0]))
        if (report := self._failed()) is not None:
            raise Lost(report, is_told=True)
        with suppress(RuntimeError):
            if self.store.check([f"ask/{self.step}/{self._asked}"]):
                report = Report(
                    self.rank, "the ranks disagree: another has something new to agree on, this one has not"
                )
                raise Lost(report, is_told=False)

    def _read(self, key: str, member: int) -> str:
        start, pause = monotonic(), 0.002
        while not self.store.check([key]):
            if (report := self._failed()) is not None:
                raise Lost(report, is_told=True)
            if monotonic() - start > self.timeout:
                rank = self.ranks.members[member]
                report = Report(rank, f"it did not come to agree on the program within {self.timeout:.3g} s")
                raise Lost(report, is_told=False)
            sleep(pause)
            pause = min(2 * pause, 0.1)
        return self.store.get(key).decode()

    def _failed(self) -> Report | None:
        with suppress(RuntimeError):
            if self.store.check(["failed"]):
                return Report.from_json(self.store.get("failed"))
        return None

    def _try_set(self, key: str, text: str) -> None:
        with suppress(RuntimeError):
            self.store.set(key, text)

    # -- failing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails here is told to all ranks; what failed elsewhere is raised as RunError."""
        try:
            yield
        except Disagreement:
            raise
        except Lost as lost:
            report = lost.report if lost.is_told else self._tell(lost.report)
            self._heard()
            self._broken = report.error()
            self._close()
            raise self._broken from None
        except Exception as error:
            report = Report.of(error, self.rank, self.action)
            self._broken = report.error()
            if self._tell(report) == report:
                self._wait_for_hearers()
            else:
                self._heard()
            self._close()
            raise
        finally:
            self.action = ""

    def _tell(self, report: Report) -> Report:
        """Post a report, or hear that of a rank that was first."""
        try:
            text = self.store.compare_set("failed", "", report.to_json())
        except RuntimeError:  # the store is gone with its rank
            return report
        return Report.from_json(text)

    def _heard(self) -> None:
        with suppress(RuntimeError):
            self.store.add("heard", 1)

    def _wait_for_hearers(self) -> None:
        end = monotonic() + min(_GRACE, self.timeout)
        with suppress(RuntimeError):
            while monotonic() < end and self.store.add("heard", 0) < len(self.ranks.members) - 1:
                sleep(0.05)

    def _close(self) -> None:
        """End all threads, as all peers do, so that none is left waiting for a message when the process ends."""
        peers = [peer for peer in range(self.ranks.size) if peer != self.ranks.index]
        for peer in peers:
            self.expect(peer, 0)
            self._in[peer].drain()
            self._outbox(peer).close()
        end = monotonic() + min(_GRACE, self.timeout)
        for thread in [box.thread for box in self._in.values()] + [box.thread for box in self._out.values()]:
            thread.join(max(end - monotonic(), 0.0))

    def _lost(self, peer: int, what: str, name: str = "") -> Lost:
        """Who is to blame for a message that does not come: a rank that waits itself is not."""
        with suppress(RuntimeError, PipecompileError):
            sleep(_POLL)  # who knows more, has told it by then
            if (report := self._failed()) is not None:
                return Lost(report, is_told=True)
        rank, seen = self.ranks.rank_of(peer), {self.rank}
        while rank not in seen and (further := self._waits(rank)) is not None:
            seen.add(rank)
            rank, name = further.rank, further.what
        return Lost(Report(rank, what, where=f"{name} was to come from it" if name else ""), is_told=False)

    def wanted(self, rank: int) -> set[str]:
        """What others wait for that is to come from a rank."""
        found = map(self._waits, self.ranks.members)
        return {wait.what for wait in found if wait is not None and wait.rank == rank}

    def _waits(self, rank: int) -> Report | None:
        with suppress(RuntimeError):
            if self.store.check([f"waits/{rank}"]):
                return Report.from_json(self.store.get(f"waits/{rank}"))
        return None


def _silence(error: Exception) -> str:
    """Why nothing comes from a rank."""
    reason = str(error).partition("\n")[0]
    return reason if isinstance(error, TimeoutError) else f"the connection to it is gone: {reason}"
