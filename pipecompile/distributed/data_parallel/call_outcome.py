"""The outcome of a call of a pipeline whose copies may be lost: it counts on all ranks, or on none.

    all ranks are past their part    one rank writes "done" into the store     all return
    a rank has failed before         one rank writes its report                all undo the call

The first to write decides. "done" is written by a rank that knows all others to be past their part: a rank that meets a failure later finds
it, and returns as well.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.protocol import OUTCOME

__all__ = ["CallOutcome"]

_DONE = "done"

_ALL = -1
"""In the keys of calls of all copies, the place of the first rank of a copy."""


class CallOutcome:
    """The outcomes of the calls of one pipeline. `pipeline` are the ranks of one copy, `copies` those with the same stages."""

    def __init__(self, communicator: Communicator, pipeline: CollectiveGroup, copies: CollectiveGroup) -> None:
        self._communicator, self._pipeline, self._copies = communicator, pipeline, copies
        self._last: dict[bool, str] = {}

    def agree(self, *, in_copy: bool) -> None:
        """Return on all ranks of all copies, or `in_copy`, of this copy; or raise RankLost on all that are left."""
        board, ranks = self._communicator.board, self._communicator.ranks
        key = OUTCOME.at(min(ranks.copy) if in_copy else _ALL, board.step)
        try:
            self._await_others(in_copy=in_copy)
        except RankLost as lost:
            if self._written(key, lost.report.to_json()) != _DONE:
                raise
            board.post_failure(lost.report)  # the next call meets it
            return
        if (written := self._written(key, _DONE)) != _DONE:
            raise RankLost(FailureReport.from_json(written), is_posted=False)
        self._forget_last(key, in_copy=in_copy)

    def _await_others(self, *, in_copy: bool) -> None:
        groups = [self._pipeline] if self._pipeline.size > 1 else []
        with torch.inference_mode(False):
            for group in groups if in_copy else [*groups, self._copies]:
                group.max(torch.zeros(1, device="cpu"))

    def _written(self, key: str, outcome: str) -> str:
        """Write an outcome unless there is one; return the one that is there. Raises RuntimeError if the store is gone."""
        written: bytes = self._communicator.board.store.compare_set(key, "", outcome)
        return written.decode()

    def _forget_last(self, key: str, *, in_copy: bool) -> None:
        """Delete the outcome of the call before: all ranks of this one have read it."""
        ranks = self._communicator.ranks
        last, self._last[in_copy] = self._last.get(in_copy), key
        if last is not None and ranks.rank == (ranks.copy if in_copy else ranks.members)[0]:
            with suppress(RuntimeError):
                self._communicator.board.store.delete_key(last)

    def renew(self) -> None:
        """Begin with the outcomes of fewer copies."""
        self._last.clear()
