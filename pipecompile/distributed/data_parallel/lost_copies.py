"""The loss of copies of a pipeline: which mesh allows the others to continue, and how they do.

rank 3 fails ──► its copy raises
                 the others agree on the remaining copies ──► new board, groups and connections ──► the call again
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from torch import nn

from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel.left_groups import lost_ranks, note_lost, open_left_group
from pipecompile.distributed.data_parallel.ranks_left import agreed_copies, copies_left, leave
from pipecompile.distributed.failures.failure_report import FailureReport
from pipecompile.distributed.failures.unopened_groups import GroupNotOpened, lost_at_opening
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import InputError, LostCopyWarning, RunError
from pipecompile.tracing.user_source import warn

__all__ = ["LostCopies", "check_lost_copies"]

_RESTART = "start the ranks again, from the last checkpoint"


def check_lost_copies(model: nn.Module, ranks: RankMesh | None) -> None:
    """Raise InputError where no copy of the pipeline can go on without another. Warn of agents of torchrun that start several copies."""
    what, hint = "", _RESTART + ": torchrun --max-restarts (docs/launching.md)"
    why = "what is lost with a copy is not on the others"
    if ranks is None or len(ranks.copies) < 2:
        what, why = "without copies of the pipeline", "the stages of the only one are lost with a rank"
        hint = 'mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")); without copies, ' + hint
    elif ranks.shard_mesh is not None:
        what, why = "with sharded parameters (dp_shard)", "all copies together hold each parameter once"
    elif ranks.tensor_group is not None:
        what, why = 'with layers in parts (a mesh with "tp")', "layers may have a message under way when a rank fails"
    elif ranks.device_type != "cpu":
        what, why = f"on ranks of {ranks.device_type!r}", "groups of NCCL that have lost a rank have never been tried"
    elif layers := [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]:
        what = "with SyncBatchNorm layers"
        why = f"the process group of {layers[0]} keeps the ranks that are lost"
        hint = 'nn.BatchNorm2d and batch_norm="deferred", which has the statistics of the whole batch'
    if what:
        raise InputError(f'lost_copies="continue" is given {what}', why=why, hint=hint)
    assert ranks is not None
    _check_agents(ranks)


def _check_agents(ranks: RankMesh) -> None:
    """Warn if the agent of torchrun that has started this rank has started ranks of other copies: it ends all of its ranks together."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    first = ranks.rank - int(os.environ.get("LOCAL_RANK", "0"))
    beside = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if others := [rank for rank in ranks.members if rank in beside and rank not in ranks.copy]:
        warn(
            f'lost_copies="continue": torchrun has started rank {ranks.rank} and rank {others[0]} of another copy of the pipeline by one'
            " agent, which ends all its ranks when one of them fails. Try an agent per copy: torchrun --nnodes=COPIES"
            f" --nproc-per-node={len(ranks.copy)} (docs/launching.md)",
            LostCopyWarning,
        )


class LostCopies:
    """The losses of copies of one pipeline. `communicator` continues with the remaining ranks."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def check(self) -> None:
        """Raise RunError if this process knows, from another pipeline, that a rank is lost: no call would end."""
        communicator = self._communicator
        if lost := [rank for rank in communicator.ranks.members if rank in lost_ranks()]:
            report = communicator.board.post_failure(FailureReport(lost[0], lost_ranks()[lost[0]], action="before"))
            communicator.guard.lost = report
            raise report.error()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Announce to the other ranks, after an error in this context, that this rank does not continue."""
        try:
            yield
        except RunError:
            with suppress(RuntimeError):
                leave(self._communicator.board)
            raise

    def go_on(self, error: RunError, call: str, parts: Sequence[float], unit: str) -> None:
        """Go on after the failure of a rank of another copy, with the ranks that are left, which call this together.

        `parts` are what the parts of a batch count, in the order of the copies that there were; empty if that is not known. Raises
        `error` if this rank's own copy is lost, or the store.
        """
        before, reports = self._communicator.ranks, list[FailureReport]()
        while (lost := self._communicator.guard.lost) is not None:  # again if a rank fails meanwhile
            left = self._agreed(lost.error() if reports else error, lost)
            reports.append(lost)
            self._communicator.renew(self._communicator.ranks.of_copies(left))
            self._open_groups()
        after = self._communicator.ranks
        gone = [number for number in before.left if number not in after.left]
        note_lost({rank: reports[0].error().what for number in gone for rank in before.copies[number]})
        self._warn(reports, gone, call, dict(zip(before.left, parts, strict=False)), unit)

    def _agreed(self, error: RunError, report: FailureReport) -> tuple[int, ...]:
        """Return the numbers of the copies that go on. Raises RunError on the others."""
        ranks, board = self._communicator.ranks, self._communicator.board
        try:
            if report.rank in ranks.copy:
                if agreed := agreed_copies(board):
                    raise _dropped(report, agreed) from None
                raise error
            left = copies_left(board, ranks, report)
        except RuntimeError as gone:
            if isinstance(gone, RunError):
                raise
            raise _store_gone(report) from None
        if ranks.number_of_copy not in left:
            raise (_dropped(self._own(report), left) if left else error) from None
        return left

    def _own(self, report: FailureReport) -> FailureReport:
        """Return the report of a rank of this rank's copy that has ended, if there is one; else the report that is posted."""
        board = self._communicator.board
        ended = ((rank, board.cause(rank, "")) for rank in self._communicator.ranks.copy)
        return next((FailureReport(rank, cause) for rank, cause in ended if cause), report)

    def _open_groups(self) -> None:
        """Open process groups of the ranks that are left, and connections. If one of them fails meanwhile, the guard has its report."""
        communicator = self._communicator
        try:
            with communicator.guarded():
                communicator.all_gather_text("copies that are left", str(communicator.ranks.left))
                try:
                    open_left_group(communicator.ranks.members, communicator.timeout)
                    communicator.replace_group(open_left_group(communicator.ranks.replicas, communicator.timeout))
                except GroupNotOpened as failed:
                    raise lost_at_opening(communicator.board, failed) from None
                communicator.connect()
        except RunError:
            if communicator.guard.lost is None:
                raise

    def _warn(
        self, reports: Sequence[FailureReport], gone: Sequence[int], call: str, parts: dict[int, float], unit: str
    ) -> None:
        ranks = self._communicator.ranks
        lost = sum(parts.get(number, 0.0) for number in gone)
        samples = f", without {lost:g} of {sum(parts.values()):g} {unit}" if lost else ""
        warn(
            f"{_named('copy', gone)} of the pipeline {'is' if len(gone) == 1 else 'are'} lost"
            f" ({_named('rank', [rank for number in gone for rank in ranks.copies[number]])}):"
            f" {'; '.join(report.error().what for report in reports)}. {_named('copy', ranks.left).capitalize()}"
            f" {'goes' if len(ranks.left) == 1 else 'go'} on: {call} is done again{samples}. Later parts of a lost copy are left out, too,"
            " if the sampler still deals them out; pipe.copies.left says who there is",
            LostCopyWarning,
        )


def _named(kind: str, numbers: Sequence[int]) -> str:
    several = {"copy": "copies", "rank": "ranks"}[kind]
    return f"{kind if len(numbers) == 1 else several} {', '.join(map(str, numbers))}"


def _dropped(report: FailureReport, left: Sequence[int]) -> RunError:
    return RunError(
        f"{_named('copy', left)} of the pipeline {'goes' if len(left) == 1 else 'go'} on without the copy of this rank",
        stage=None,
        microbatch=0,
        why=report.error().what,
        hint="end this rank; a lost copy cannot come back, but by a start of all ranks from the last checkpoint",
    )


def _store_gone(report: FailureReport) -> RunError:
    return RunError(
        "the store of torch.distributed is gone, so the ranks cannot agree on which copies of the pipeline are left",
        stage=None,
        microbatch=0,
        where=report.error().what,
        why="it was in a process of a copy that is lost, or on its host",
        hint=_RESTART + "; and the store in a process that no copy can take with it (docs/launching.md)",
    )
