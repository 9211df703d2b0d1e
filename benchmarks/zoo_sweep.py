"""The sweep: models are examined one by one in a worker process, which outlives neither a crash nor a time limit."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Keeper", "serve"]

LIMITS = {"eager": 120, "record": 300, "train": 900, "symbolic_trace": 60, "export": 120}
"""Seconds for each phase."""

MEMORY, MODELS = 4 << 30, 40
"""A worker is replaced when it holds more bytes than this after a model, or has seen so many."""


class Keeper:
    """Keeps one worker alive. Each row that it returns is all that was found out about a model, however that ended."""

    def __init__(self, log: Path, *, baselines: bool) -> None:
        self.log, self.baselines = log, baselines
        self.worker: subprocess.Popen[bytes] | None = None
        self.seen = 0

    def examine(self, library: str, name: str) -> dict[str, Any]:
        """Have one model examined. Never raises for what the model does."""
        row: dict[str, Any] = {"library": library, "name": name}
        worker = self._worker()
        assert worker.stdin is not None
        worker.stdin.write(json.dumps([library, name, self.baselines]).encode() + b"\n")
        worker.stdin.flush()
        for event in self._events(worker):
            row.update(event)
            if event.get("phase") == "end":
                break
        else:
            self._end()
            if row.get("phase") in ("symbolic_trace", "export"):
                row[f"{row['phase']}_error"] = "killed after its time limit, or crashed"
            else:
                row["error"] = f"killed in {row.get('phase')} after its time limit, or crashed"
        self.seen += 1
        if row.get("resident", 0) > MEMORY or self.seen >= MODELS:
            self._end()
        return row

    def _events(self, worker: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
        """What the worker tells; ends early when it dies or a phase takes much longer than its own alarm allows."""
        assert worker.stdout is not None
        phase = "eager"
        while select.select([worker.stdout], [], [], LIMITS.get(phase, 60) + 60)[0]:
            line = worker.stdout.readline()
            if not line:
                return
            event: dict[str, Any] = json.loads(line)
            phase = event.get("phase", phase)
            yield event

    def _worker(self) -> subprocess.Popen[bytes]:
        if self.worker is None or self.worker.poll() is not None:
            command = [sys.executable, str(Path(__file__).with_name("zoo.py")), "--serve"]
            with self.log.open("ab") as log:
                self.worker = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
                )
            self.seen = 0
        return self.worker

    def _end(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()
            self.worker = None

    close = _end


def serve() -> None:
    """A worker: reads [library, name, whether to ask the baselines too] line by line, and tells what it finds, one JSON object a line."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
    import torch
    from zoo_check import examine
    from zoo_models import specimens

    torch.set_num_threads(1)
    known: dict[tuple[str, str], Any] = {}

    def tell(**event: Any) -> None:
        told.write(json.dumps(event) + "\n")

    for line in sys.stdin:
        library, name, baselines = json.loads(line)
        if (library, name) not in known:
            known |= {(library, specimen.name): specimen for specimen in specimens(library)}
        specimen = known[library, name]
        tell(group=specimen.group)
        if specimen.skipped:
            tell(skipped=specimen.skipped)
        else:
            examine(specimen, tell, limited, baselines=baselines)
        tell(resident=_resident(), phase_reached=True)
        tell(phase="end")


def _resident() -> int:
    import gc

    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def limited(phase: str) -> Iterator[None]:
    """Raise TimeoutError inside the block when the phase takes too long."""

    def ring(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"{phase}: more than {LIMITS[phase]} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMITS[phase])
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def listed(library: str) -> list[str]:
    """The names of a library's models, asked of a process of its own."""
    code = f"import zoo_models; print(*(s.name for s in zoo_models.specimens({library!r})), sep='\\n')"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return made.stdout.splitlines()


def progress(row: dict[str, Any], number: int, total: int, started: float) -> str:
    """One line about one model."""
    error = row.get("error", row.get("skipped", "")).split("\n")[0][:110]
    figures = " ".join(
        f"{key}={row[key]:.3g}" for key in ("trace", "eager", "output", "loss", "gradient", "buffers") if key in row
    )
    return f"[{number}/{total} {time.time() - started:4.0f}s] {row['library']} {row['name']}: {row.get('nodes', '')} nodes {figures} {error}"


def rows_of(path: Path) -> Iterable[dict[str, Any]]:
    """The rows of an earlier sweep; a line that was cut off is left out."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
