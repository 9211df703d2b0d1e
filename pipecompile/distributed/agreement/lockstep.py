"""Lockstep: before a call of a pipeline runs, its ranks compare what they were asked for, in one exchange over the control group.

    rank 1 ──[call, recording, reads, updates, digest, contents]──► rank 0 ──[verdict, highest and lowest recording, is whole, ...]──► rank 1, 2
    rank 2 ──[call, recording, reads, updates, digest, contents]──►

Two ranks send their rows to each other, which takes half the time. The receives of the next rows are posted when a call ends.

`call` is a number for the function, the modes and the layout of the batch: equal on all ranks. `recording` is the one that a rank would
use. `contents` has a number per leaf of the batch, 0 for a placeholder, and `reads` the leaves that the stages of the rank read. Ranks
have another batch than each other if a leaf that both read differs, or every leaf that says anything. If the digests of all leaves are
equal, every rank has the whole batch. `updates` stands for what a rank did to its weights since the last call, 0 for nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

from pipecompile.distributed.agreement.call_rows import CallRows
from pipecompile.distributed.agreement.collective_call import COMPARED_PLACES, CollectiveCall, hash_of
from pipecompile.distributed.agreement.step_agreement import ranks_by_text, texts_of_ranks
from pipecompile.distributed.agreement.tensor_siblings import TensorSiblings
from pipecompile.distributed.agreement.update_differences import UpdateDifferences
from pipecompile.distributed.agreement.weight_updates import Updates
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.failures.board_watch import PATIENCE, POLL, await_report
from pipecompile.distributed.failures.failure_report import CopyDisagreement, RankLost
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import PipecompileError, PlanError

__all__ = ["Lockstep"]

Reads = Callable[[int, int], int | None]
"""A function from the number of a recording, and of the inputs of a batch, to the leaves that this rank's stages read of it, as bits;
None if it is not known.
"""

_ASKED, _VERDICT = "what a rank is asked for", "verdict on what ranks are asked for"

_CALL, _RECORDING, _READS, _UPDATES, _DIGEST, _CONTENTS = range(6)
"""Places of a row; the contents are the rest of it."""

_VERDICT_LENGTH = 5

_DISCUSSED = 8
"""Calls in which ranks that updated their weights differently say how; later they do in calls 16, 32, 64 ..."""

_UNKNOWN = -1
"""Bits of leaves that are read, if that is not known."""


class _Verdict(IntEnum):
    EQUAL = 0
    OTHER_CALLS = 1
    OTHER_SAMPLES = 2


class Lockstep:
    """The comparison of one call after the other, on one rank of a pipeline. `calls` counts them. `is_whole`: in the present call every
    rank has the inputs and the target, and no placeholders for what it does not need.

    A call whose recording is looked up is compared there, together with the number of the recording. `is_late`: its samples are
    compared once the call has a recording.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self.calls = communicator, 0
        self._rows = CallRows(communicator, _CONTENTS + COMPARED_PLACES)
        self.reads: Reads = lambda *_: None
        self.updates: Callable[[], Updates | None] = lambda: None
        self._differences, self._discussed = UpdateDifferences(), 0
        self._siblings = TensorSiblings(communicator)
        self._call: CollectiveCall | None = None
        self._compared: tuple[int, int] | None = None
        self._is_pending = self._is_late = self.is_whole = False

    @property
    def is_due(self) -> bool:
        """Whether what costs something is compared: reading a GPU waits for it, so in calls 1, 2, 4, 8 ..."""
        return self.calls & (self.calls - 1) == 0

    @property
    def is_pending(self) -> bool:
        """Whether the present call has not been compared."""
        return self._is_pending

    @contextmanager
    def of(self, call: CollectiveCall, *, is_looked_up: bool = False) -> Iterator[None]:
        """Run a call in this context. Raises PlanError, on all ranks of the pipeline, if one is asked for something else.

        With `is_looked_up`, the comparison is left to `recordings`.
        """
        self.calls += 1
        has_others = self._communicator.ranks.size > 1
        call = self._siblings.compared(call, is_due=self.is_due)
        self._call, self._is_pending, self._is_late = call, has_others, has_others
        try:
            if has_others and not is_looked_up:
                self._compared = self.recordings(0)
            yield
            self._rows.flush()
            self._rows.expect(_senders(self._communicator.ranks))
        except PipecompileError as error:
            if self._is_pending:
                self._compare_error(error)
            raise
        finally:
            self._compared = None
            self._call, self._is_pending, self._is_late, self.is_whole = None, False, False, False

    def recordings(self, found: int) -> tuple[int, int]:
        """Compare the call; return the highest and the lowest number of the recordings that ranks have `found`."""
        self._is_pending = False
        highest, lowest = self._compare(found)
        self._is_late = highest != lowest or not found
        return highest, lowest

    def taken(self) -> tuple[int, int] | None:
        """Return, once, what `recordings` said at the begin of this call: to a rank without recordings, where others may look one up."""
        compared, self._compared = self._compared, None
        return compared

    def compare_samples(self, recording: int) -> None:
        """Compare the samples of a call that has this recording now, unless that is done."""
        if self._is_late:
            self._is_late = False
            assert self._call is not None
            if not self._call.has_samples:
                return
            self._compare(recording)

    def _compare_error(self, error: PipecompileError) -> None:
        """Compare an error that this rank raises in place of the call. If all raise one, or are told of it, the pipeline goes on."""
        assert self._call is not None
        self._is_pending = False
        call = replace(self._call, modes=f"{self._call.modes}, which raised {type(error).__name__}: {error.what}")
        row = [call.key, 0, _UNKNOWN, 0, *[0] * (1 + COMPARED_PLACES)]
        try:
            verdict, *_ = _exchanged(self._rows, self._communicator.ranks, row)
        except RankLost:
            return
        if verdict == _Verdict.OTHER_CALLS:
            raise _other_calls(self._communicator, texts_of_ranks(self._communicator, str(call))) from error
        if self._communicator.ranks.copy == self._communicator.ranks.members:
            self._communicator.guard.common = error

    def _compare(self, found: int) -> tuple[int, int]:
        communicator, call = self._communicator, self._call
        assert call is not None
        is_compared = bool(found) and call.has_samples
        reads = call.read_bits(self.reads(found, call.batch.n_inputs)) if is_compared else None
        if not reads and call.gives_outputs:
            reads = None  # it returns the outputs of the samples that others read
        contents = call.contents(is_due=self.is_due) if is_compared else [0] * (1 + COMPARED_PLACES)
        updates, number = self._updates_now()
        row = [call.key, found, _UNKNOWN if reads is None else reads, number, *contents]
        try:
            verdict, highest, lowest, is_whole, is_unlike = _exchanged(self._rows, communicator.ranks, row)
        except RankLost as lost:
            raise _named(communicator, lost) from None
        self.is_whole = bool(is_whole)
        if verdict == _Verdict.OTHER_CALLS:
            raise _other_calls(communicator, texts_of_ranks(communicator, str(call)))
        if verdict == _Verdict.OTHER_SAMPLES:
            raise _other_samples(communicator, texts_of_ranks(communicator, call.samples()))
        if is_unlike:
            self._discuss(updates)
        return highest, lowest

    def _updates_now(self) -> tuple[Updates | None, int]:
        """Return what this rank did to its weights, and a number for it."""
        updates = self.updates() if self._discussed < _DISCUSSED or self.is_due else None
        return updates, 0 if updates is None else hash_of(updates.key) or 1

    def _discuss(self, updates: Updates | None) -> None:
        """Warn of what ranks did differently, on all of them."""
        self._discussed += 1
        ranks, texts = (
            self._communicator.ranks,
            texts_of_ranks(self._communicator, updates.to_json() if updates else ""),
        )
        those = [Updates.from_json(text) if text else None for text in texts]
        self._differences.warn([*map(ranks.rank_of, range(ranks.size))], those)


def _named(communicator: Communicator, lost: RankLost) -> RankLost:
    """Return the reason why a rank is lost, as ranks report it that know more, or with what it owed."""
    if lost.is_posted:
        return lost
    await_report(communicator.check, POLL if lost.is_late else PATIENCE)
    name = lost.report.awaited
    owed = "before its next call" if name in (_ASKED, _VERDICT, "") else f"before {name} arrived"
    return RankLost(replace(lost.report, action=lost.report.action or owed), is_posted=False)


def _senders(ranks: RankMesh) -> Sequence[int]:
    """Return the peers whose rows a rank receives: of two, the other one; else the first rank, which receives those of all others."""
    if ranks.size <= 2 or ranks.index == 0:
        return [peer for peer in range(ranks.size) if peer != ranks.index]
    return [0]


def _exchanged(rows: CallRows, ranks: RankMesh, row: list[int]) -> list[int]:
    """Return the verdict on the rows of all ranks, of the first rank or, of two, of both: its number, the highest and the lowest
    recording, is the batch whole, are updates unlike.
    """
    peers = _senders(ranks)
    rows.expect(peers)
    if ranks.size == 2:
        rows.send(peers[0], row)
        return _summary([row, rows.receive(peers[0], _ASKED)])
    if ranks.index != 0:
        rows.send(0, row)
        return rows.receive(0, _VERDICT)[:_VERDICT_LENGTH]
    verdict = _summary([row, *(rows.receive(peer, _ASKED) for peer in peers)])
    for peer in peers:
        rows.send(peer, verdict)
    return verdict


def _summary(rows: Sequence[Sequence[int]]) -> list[int]:
    found = [row[_RECORDING] for row in rows]
    is_whole = len({row[_DIGEST] for row in rows}) == 1 and rows[0][_DIGEST] != 0
    is_unlike = len({row[_UPDATES] for row in rows if row[_UPDATES]}) > 1
    return [_verdict_on(rows), max(found), min(found), int(is_whole), int(is_unlike)]


def _verdict_on(rows: Sequence[Sequence[int]]) -> int:
    if len({row[_CALL] for row in rows}) > 1:
        return _Verdict.OTHER_CALLS
    if len({row[_RECORDING] for row in rows}) > 1:
        return _Verdict.EQUAL  # samples are compared when all have one recording
    kinds = [*{(row[_READS], *row[_CONTENTS:]) for row in rows}]
    pairs = ((one, other) for place, one in enumerate(kinds) for other in kinds[:place])
    return _Verdict.OTHER_SAMPLES if any(_conflict(one, other) for one, other in pairs) else _Verdict.EQUAL


def _conflict(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two ranks that read these leaves have other samples. A rank that reads none may have any."""
    (reads, *contents), (other_reads, *other_contents) = one, other
    said = [(place, a, b) for place, (a, b) in enumerate(zip(contents, other_contents, strict=True)) if a and b]
    if not reads or not other_reads:
        return False
    both = 0 if _UNKNOWN in (reads, other_reads) else reads & other_reads
    no_placeholders = [a != b for _, a, b in said if a & b & 1]
    return (bool(no_placeholders) and all(no_placeholders)) or any(a != b and both >> place & 1 for place, a, b in said)


def _other_calls(communicator: Communicator, texts: Sequence[str]) -> PlanError:
    return CopyDisagreement(
        "the ranks of a pipeline are asked for different things",
        where=ranks_by_text(communicator, texts),
        why="all ranks of a pipeline make the same calls, in the same modes, with batches of the same layout",
        hint="the call on every rank, not under `if rank == 0`; and a batch of the same shape on every rank of a pipeline",
    )


def _other_samples(communicator: Communicator, texts: Sequence[str]) -> PlanError:
    return CopyDisagreement(
        "the ranks of a pipeline have different samples in the same step",
        where=ranks_by_text(communicator, texts),
        why="the stages of a pipeline work on one batch: a rank has skipped a step, or its sampler is one over all ranks",
        hint="one sampler for all ranks of a pipeline, with one seed: DistributedSampler(data, num_replicas=mesh['dp'].size(), "
        "rank=mesh['dp'].get_local_rank()), without copies no DistributedSampler; torch.zeros_like(x) where a rank loads no samples",
    )
