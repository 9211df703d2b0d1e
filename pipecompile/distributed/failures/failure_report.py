"""Reports that a rank posts when it fails, and the exceptions that the ranks raise for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from pipecompile.distributed.failures.handled_exceptions import with_handled
from pipecompile.errors import PipecompileError, PlanError, RunError

__all__ = [
    "AwaitedMessage",
    "CopyDisagreement",
    "Disagreement",
    "FailureReport",
    "RankLost",
    "StageDisagreement",
    "ranks_of_texts",
]


class Disagreement(PlanError):
    """The ranks are about to do different things. All ranks raise it, so no report is posted."""


class CopyDisagreement(PlanError):
    """The ranks of one copy of the pipeline are about to do different things. All of them raise it; other copies have a report."""


class StageDisagreement(PlanError):
    """The ranks of one stage, in several copies of the pipeline, are about to do different things. All of them raise it; those of
    other stages have a report.
    """


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The failure of `rank`.

    `action` is a phrase for the message: "at 2F1" if the rank raised there, "before the result of 2F1 arrived" if it went silent.
    `stage` and `microbatch` are those of the action, if there is one. `awaited` is the name of the value that another rank was
    waiting for; empty if none. `is_of_copy`: all ranks of its copy of the pipeline failed with it, for they disagree;
    `is_of_stage`: all ranks of its stage, in all copies.
    """

    rank: int
    what: str
    where: str = ""
    action: str = ""
    stage: int | None = None
    microbatch: int = 0
    hint: str = ""
    awaited: str = ""
    is_of_copy: bool = False
    is_of_stage: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int, action: str = "") -> FailureReport:
        """Return the report of an error that this rank raised."""
        if isinstance(error, RunError):
            what = with_handled(error, error.what)
            return cls(rank, what, error.where, action, error.stage, error.microbatch, error.hint)
        if isinstance(error, CopyDisagreement):
            return cls(rank, error.what, error.where, hint=error.hint, is_of_copy=True)
        if isinstance(error, StageDisagreement):
            return cls(rank, error.what, error.where, hint=error.hint, is_of_stage=True)
        text = f"{type(error).__name__}: {error.what}" if isinstance(error, PipecompileError) else ""
        return cls(rank, with_handled(error, text), getattr(error, "where", ""), action)

    @classmethod
    def outside(cls, error: BaseException, rank: int, *, has_copies: bool) -> FailureReport:
        """Return the report of an error that this rank has raised outside of a step, and has not caught."""
        report = cls.of(error, rank, "outside a step")
        if not report.is_of_copy or has_copies:
            return report
        what = with_handled(error, f"{type(error).__name__}: {report.what}")  # others have raised it, too, and go on
        return replace(report, what=what, action="outside a step", is_of_copy=False)

    def error(self) -> RunError:
        """Return the error that another rank raises."""
        action = f" {self.action}" if self.action else ""
        who = "another copy of the pipeline" if self.is_of_copy else f"rank {self.rank}"
        who = "the ranks of another stage" if self.is_of_stage else who
        return RunError(
            f"{who} failed{action}: {self.what}",
            stage=self.stage,
            microbatch=self.microbatch,
            where=self.where or (f"waiting for {self.awaited} from rank {self.rank}" if self.awaited else ""),
            hint=self.hint,
        )

    def own_error(self) -> RunError:
        """Return the error as later calls of this rank say it: of a disagreement, no rank is said to have failed."""
        if not self.is_of_copy and not self.is_of_stage:
            return self.error()
        return RunError(self.what, stage=None, microbatch=0, where=self.where, hint=self.hint)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> FailureReport:
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True, slots=True)
class AwaitedMessage:
    """A value `name` that a waiting rank expects from `rank`, in run number `step` of the waiting rank.

    The step is needed because a rank may run ahead: two ranks that wait for the same rank may be in different steps.
    """

    rank: int
    name: str
    step: int

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> AwaitedMessage:
        return msgspec.json.decode(text, type=cls)


class RankLost(Exception):
    """A failure of another rank, until the communicator raises it as a RunError.

    `is_posted`: the store has the report. `is_late`: the timeout is over, so no other rank is awaited that may know more.
    """

    def __init__(self, report: FailureReport, *, is_posted: bool, is_late: bool = False) -> None:
        super().__init__(report.what)
        self.report, self.is_posted, self.is_late = report, is_posted, is_late

    def anew(self) -> RankLost:
        """Return the loss as another exception: one that is kept and raised keeps the frames of the calls that it ended."""
        return RankLost(self.report, is_posted=self.is_posted, is_late=self.is_late)


def ranks_of_texts(ranks: Iterable[int], texts: Iterable[str]) -> str:
    """Return which ranks have which text: "ranks 0, 1: a; rank 2: b"."""
    ranks_of: dict[str, list[str]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        ranks_of.setdefault(text, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(some) > 1)} {', '.join(some)}: {text}" for text, some in ranks_of.items())
