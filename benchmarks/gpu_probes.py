"""What the parts of `make gpu` have in common: probes that are run one by one, each result kept, so that a part goes on where it ended.

    @probe(aim="0 waits")            out/gpu/hazards.json    {"no_host_wait": {"measured": ..., "passed": true, "seconds": 3.1}, ...}
    def no_host_wait(card): ...      a probe that fails is a result; one that is killed with its process is reported as such

On a machine without a GPU, `--dry` runs the same code on the CPU, with small models, and proves that it runs, not that it is fast.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch

OUT = Path("out/gpu")


@dataclass(frozen=True, slots=True)
class Card:
    """Where probes run: a GPU, or with `dry` the CPU."""

    dry: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda:0")

    def devices(self, count: int) -> list[torch.device]:
        return [self.device] * count

    def sizes(self, full: int, dry: int) -> int:
        return dry if self.dry else full

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe measured. `passed` is None where there is no aim."""

    measured: str
    passed: bool | None = None


class Skipped(Exception):
    """Raised by a probe that cannot run here; its text is the reason."""


Probe = Callable[[Card], Finding]


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the table."""

    aim: str
    measured: str
    verdict: str
    seconds: float


class Part:
    """One of the five parts: its probes, in order, and their results in `out/gpu`."""

    def __init__(self, name: str, title: str) -> None:
        self.name, self.title = name, title
        self.probes: dict[str, tuple[str, Probe]] = {}

    def probe(self, aim: str = "") -> Callable[[Probe], Probe]:
        """Add a probe; `aim` is what it should find."""

        def add(function: Probe) -> Probe:
            self.probes[function.__name__] = aim, function
            return function

        return add

    def main(self) -> None:
        """Run the probes that have no result yet. Exit with 1 if one of all failed."""
        options = _options(self.title)
        card, path = Card(options.dry), result_path(self.name, options.dry)
        results = {} if options.again else results_of(path)
        if not card.dry and not torch.cuda.is_available():
            raise SystemExit("no GPU is here; --dry runs on the CPU")
        for name, (aim, function) in self.probes.items():
            if name in results or (options.probes and name not in options.probes):
                continue
            results[name] = Result(aim, "the process ended in it", "FAIL", 0.0)
            _write(path, results)
            results[name] = _ran(function, aim, card)
            _write(path, results)
            print(
                f"{name:34s} {results[name].verdict:8s} {results[name].measured}  [{results[name].seconds:.1f} s]",
                flush=True,
            )
        sys.exit(any(result.verdict == "FAIL" for result in results.values()))


def _options(title: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("probes", nargs="*", help="only these")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with small models")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    return parser.parse_args()


def _ran(function: Probe, aim: str, card: Card) -> Result:
    torch.manual_seed(0)
    start = perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            finding = function(card)
        verdict = "measured" if finding.passed is None else "ok" if finding.passed else "FAIL"
        measured = finding.measured
    except Skipped as skipped:
        verdict, measured = "skipped", str(skipped)
    except Exception:
        verdict, measured = "FAIL", traceback.format_exc(limit=-2).strip().replace("\n", " / ")[-400:]
    return Result(aim, measured, verdict, perf_counter() - start)


def result_path(part: str, dry: bool) -> Path:
    return OUT / ("dry" if dry else "card") / f"{part}.json"


def results_of(path: Path) -> dict[str, Result]:
    """Return the results so far."""
    if not path.exists():
        return {}
    return {name: Result(**result) for name, result in json.loads(path.read_text()).items()}


def _write(path: Path, results: dict[str, Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))


def machine(dry: bool) -> str:
    """Return machine and versions in a line."""
    where = f"CPU ({platform.machine()})" if dry else torch.cuda.get_device_name()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{where}, torch {torch.__version__}, Python {platform.python_version()}, commit {commit or 'unknown'}"
