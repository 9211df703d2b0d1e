"""`explain`: a report on the recording of a model, or the reason why there is none. It never raises.

MoE (training): recorded as 18 nodes of 9 modules, 702 parameters, in 0.4 s
kept whole      r1   PC103 ... model.py:9 in Router.forward:  rows = (idx == i).nonzero()
right while     batch_size > 3
risks           batch statistics (2): ...
failures        PC101 ...
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from torch import nn

from pipecompile.batching.batch_dims import BatchDims
from pipecompile.errors import InputError, TraceError, described
from pipecompile.graph.risks import Risk, risks
from pipecompile.tracing import trace
from pipecompile.tracing.recording_report import RecordingReport, WholeModule, summarize_recording
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import raiser

__all__ = ["Explanation", "TraceFailure", "explain"]


@dataclass(frozen=True, slots=True)
class TraceFailure:
    """A reason why the model cannot be recorded: a stable code, the user's line and a hint. `page` documents the code."""

    code: str
    what: str
    file: str
    line: int
    function: str
    source: str
    why: str
    hint: str
    page: str
    text: str

    @classmethod
    def of(cls, error: TraceError) -> TraceFailure:
        return cls(error.code, error.what, error.file, error.line, error.function, error.source, error.why, error.hint,
                   error.page, str(error))  # fmt: skip

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of `explain`. `report` is None if there is no recording; `failures` has the reasons."""

    model: str
    training: bool
    seconds: float
    report: RecordingReport | None
    risks: tuple[Risk, ...]
    failures: tuple[TraceFailure, ...]

    def __repr__(self) -> str:
        found = f"n_risks={len(self.risks)}, n_failures={len(self.failures)}"
        return f"Explanation({self.model}, traced={self.traced}, {found})"

    @property
    def traced(self) -> bool:
        """Whether there is a recording."""
        return self.report is not None

    @property
    def kept_whole(self) -> tuple[WholeModule, ...]:
        """The modules that are one node each, with the reason."""
        return () if self.report is None else self.report.kept_whole

    @property
    def guards(self) -> tuple[str, ...]:
        """The conditions on the batch size under which the recording is right."""
        return () if self.report is None else self.report.guards

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"traced": self.traced, **asdict(self)}

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluation"
        outcome = f"recorded as {self.report.summary}, in" if self.report else "cannot be recorded, tried for"
        parts = [f"{self.model} ({mode}): {outcome} {self.seconds:.2f} s"]
        for title, entries in (
            ("kept whole", self.kept_whole),
            ("right while", self.guards),
            ("risks", self.risks),
            ("failures", self.failures),
        ):
            if entries:
                parts += ["", title, *(_indented(str(entry)) for entry in entries)]
        return "\n".join(parts)


def explain(model: nn.Module, /, *args: Any, batch_dims: BatchDims | None = None, **kwargs: Any) -> Explanation:
    """Record `model` on these inputs, as `trace` does, and return a report. The model does not change.

    Never raises an Exception, whatever the model and the inputs are; KeyboardInterrupt and SystemExit pass.
    """
    start = perf_counter()
    graph, failures = _attempt(model, args, kwargs, batch_dims)
    seconds = perf_counter() - start
    recording: RecordingReport | None = None
    found: tuple[Risk, ...] = ()
    try:
        recording = None if graph is None else summarize_recording(graph)
        found = risks(model, graph) if isinstance(model, nn.Module) else ()
    except Exception as error:
        failures += (_unforeseen(error),)
    training = bool(getattr(model, "training", False))
    return Explanation(type(model).__name__, training, seconds, recording, found, failures)


def _attempt(
    model: Any, args: Any, kwargs: Any, batch_dims: BatchDims | None
) -> tuple[TracedGraph | None, tuple[TraceFailure, ...]]:
    try:
        return trace(model, *args, batch_dims=batch_dims, **kwargs), ()
    except TraceError as error:
        return None, (TraceFailure.of(error),)
    except InputError as error:
        fault = TraceError(error.what, code="PC109", where=error.where, why=error.why, hint=error.hint)
        return None, (TraceFailure.of(fault),)
    except Exception as error:
        return None, (_unforeseen(error),)


def _unforeseen(error: Exception) -> TraceFailure:
    return TraceFailure.of(TraceError(f"cannot trace: {described(error)}", where=raiser(error)))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
