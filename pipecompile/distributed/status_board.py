"""The board: a store where all ranks can read what all must agree on, who failed, and who waits for whom."""

from __future__ import annotations

import os
from contextlib import suppress
from time import monotonic, sleep

from torch.distributed.distributed_c10d import PrefixStore

from pipecompile.distributed.blame import AwaitedMessage, Disagreement, FailureReport, RankLost
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.torch_private.process_groups import default_store

__all__ = ["StatusBoard"]

_GRACE = 10.0
"""Seconds that a failing rank gives the others to hear of it."""


class StatusBoard:
    """The ranks of a mesh, this one of them, and the part of the store that is theirs."""

    def __init__(self, ranks: RankMesh, rank: int, number: int) -> None:
        self.ranks, self.rank, self.timeout = ranks, rank, ranks.timeout
        name = "-".join(map(str, ranks.members))
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store of torchrun outlives the ranks
        self.store = PrefixStore(f"pipecompile/{start}/{name}/{number}", default_store())
        self.step = self._asked = self._rounds = 0

    def begin(self) -> None:
        """A run begins."""
        self.step, self._asked = self.step + 1, 0

    # -- what all must agree on ---------------------------------------------------------------------------------------

    def all_gather_text(self, topic: str, text: str) -> list[str]:
        """What every member says to a topic. Raises Disagreement when one is asked something else, RankLost when one is silent."""
        place, count = self.ranks.member_index, len(self.ranks.members)
        self._rounds += 1
        self.store.set(f"ask/{self.step}/{self._asked}", "")
        self._asked += 1
        self.store.set(f"round/{self._rounds}/{place}", f"{topic}\n{text}")
        said = [self._read(f"round/{self._rounds}/{member}", member) for member in range(count)]
        topics = [words.partition("\n")[0] for words in said]
        if len(set(topics)) > 1:
            self._disagree(topics, "what to do next")
        return [words.partition("\n")[2] for words in said]

    def agree(self, topic: str, text: str) -> None:
        """Raise Disagreement, on all ranks, unless all say the same."""
        said = self.all_gather_text(topic, text)
        if len(set(said)) > 1:
            self._disagree(said, topic)

    def _disagree(self, said: list[str], topic: str) -> None:
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

    def _read(self, key: str, member: int) -> str:
        start, pause = monotonic(), 0.002
        while not self.store.check([key]):
            if (report := self.failed()) is not None:
                raise RankLost(report, is_told=True)
            if monotonic() - start > self.timeout:
                rank = self.ranks.members[member]
                report = FailureReport(rank, f"it did not come to agree on the program within {self.timeout:.3g} s")
                raise RankLost(report, is_told=False)
            sleep(pause)
            pause = min(2 * pause, 0.1)
        return self.store.get(key).decode()

    # -- who failed ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Raise RankLost when a rank failed, or asks for something that this one is not asked for."""
        if (report := self.failed()) is not None:
            raise RankLost(report, is_told=True)
        with suppress(RuntimeError):
            if self.store.check([f"ask/{self.step}/{self._asked}"]):
                what = "the ranks disagree: another has something new to agree on, this one has not"
                raise RankLost(FailureReport(self.rank, what), is_told=False)

    def failed(self) -> FailureReport | None:
        with suppress(RuntimeError):  # the store is gone with its rank
            if self.store.check(["failed"]):
                return FailureReport.from_json(self.store.get("failed"))
        return None

    def tell(self, report: FailureReport) -> FailureReport:
        """Post a report, or hear that of a rank that was first."""
        try:
            return FailureReport.from_json(self.store.compare_set("failed", "", report.to_json()))
        except RuntimeError:
            return report

    def heard(self) -> None:
        with suppress(RuntimeError):
            self.store.add("heard", 1)

    def wait_for_hearers(self) -> None:
        end = monotonic() + min(_GRACE, self.timeout)
        with suppress(RuntimeError):
            while monotonic() < end and self.store.add("heard", 0) < len(self.ranks.members) - 1:
                sleep(0.05)

    # -- who waits for whom -------------------------------------------------------------------------------------------

    def say_wait(self, rank: int, name: str) -> None:
        with suppress(RuntimeError):
            self.store.set(f"waits/{self.rank}", AwaitedMessage(rank, name, self.step).to_json())

    def unsay_wait(self) -> None:
        """The key stays, for who finds one that is gone before it is read would wait for it."""
        with suppress(RuntimeError):
            self.store.set(f"waits/{self.rank}", "")

    def to_blame(self, rank: int, name: str) -> tuple[int, str]:
        """Whose fault it is that a message does not come, and which one it owes: a rank that waits itself has none."""
        seen = {self.rank}
        while rank not in seen and (further := self.waits(rank)) is not None:
            seen.add(rank)
            rank, name = further.rank, further.what
        return rank, name

    def wanted(self, rank: int, own: str) -> set[str]:
        """What is to come from a rank: `own` to this one, and what others wait for; of several steps, in the earliest."""
        waits = [wait for wait in map(self.waits, self.ranks.members) if wait is not None and wait.rank == rank]
        first = min((wait.step for wait in waits), default=self.step)
        return {wait.what for wait in waits if wait.step == first} | ({own} if first >= self.step else set())

    def waits(self, rank: int) -> AwaitedMessage | None:
        """For whom and for what a rank says that it waits."""
        with suppress(RuntimeError):
            if self.store.check([f"waits/{rank}"]) and (text := self.store.get(f"waits/{rank}")):
                return AwaitedMessage.from_json(text)
        return None
