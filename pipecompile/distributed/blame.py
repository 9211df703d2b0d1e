"""What one rank tells all others when it fails, and what they raise."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pipecompile.errors import PipecompileError, PlanError, RunError

__all__ = ["Disagreement", "RankLost", "AwaitedMessage", "FailureReport"]


class Disagreement(PlanError):
    """The ranks are not about to do the same; all of them know it."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Rank `rank` failed "at 2F1", or "before 2F1 had come" from it, in a stage and a micro-batch if that is an action."""

    rank: int
    what: str
    where: str = ""
    action: str = ""
    stage: int | None = None
    microbatch: int = 0
    hint: str = ""

    @classmethod
    def of(cls, error: Exception, rank: int, action: str = "") -> FailureReport:
        """What is to be told of an error."""
        if isinstance(error, RunError):
            return cls(rank, error.what, error.where, action, error.stage, error.microbatch, error.hint)
        what = error.what if isinstance(error, PipecompileError) else str(error)
        return cls(rank, f"{type(error).__name__}: {what}", getattr(error, "where", ""), action)

    def error(self) -> RunError:
        """What another rank raises."""
        doing = f" {self.action}" if self.action else ""
        return RunError(
            f"rank {self.rank} failed{doing}: {self.what}",
            stage=self.stage,
            microbatch=self.microbatch,
            where=self.where,
            hint=self.hint,
        )

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> FailureReport:
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True, slots=True)
class AwaitedMessage:
    """Who waits says that `rank` owes `what`, in a step: one may be in a later step than another, who waits for the same rank."""

    rank: int
    what: str
    step: int

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> AwaitedMessage:
        return msgspec.json.decode(text, type=cls)


class RankLost(Exception):
    """A rank failed; inside the library, until it is raised as a RunError. `is_told`: the others know."""

    def __init__(self, report: FailureReport, *, is_told: bool) -> None:
        super().__init__(report.what)
        self.report, self.is_told = report, is_told
