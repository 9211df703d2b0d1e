"""Half an hour on a GPU: five parts of at most five minutes, one after another, and one table of what they found.

    python benchmarks/gpu.py [--dry] [--again] [--markdown benchmarks/results/gpu.md]         or: make gpu [ARGS=--dry]

A part goes on where it ended: run the command once more after an interruption. Each part can be run by itself, and each of its probes:
`python benchmarks/gpu_hazards.py no_host_wait`. Results are kept in out/gpu. `--dry` runs all of it on the CPU, in under two minutes; its
table goes to out/gpu/dry/gpu.md and says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from gpu_probes import OUT, Result, machine, result_path, results_of

PARTS = {
    "hazards": "Correctness and hazards",
    "overhead": "Overhead on one card",
    "partitions": "A pipeline on parts of one card",
    "timelines": "Timelines and costs",
    "cores": "Many cores",
}
LIMIT = 300
"""Seconds of a part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--markdown", type=Path, default=None)
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        raise SystemExit("no GPU is here: `make gpu ARGS=--dry` runs all of it on the CPU")
    for part, title in PARTS.items():
        print(f"\n== {title}", flush=True)
        run(part, options.dry, options.again)
    target = options.markdown or (OUT / "dry/gpu.md" if options.dry else Path("benchmarks/results/gpu.md"))
    results = {part: results_of(result_path(part, options.dry)) for part in PARTS}
    target.write_text(table(results, options.dry))
    print(f"\n{target}")
    sys.exit(any(result.verdict == "FAIL" for some in results.values() for result in some.values()))


def run(part: str, dry: bool, again: bool) -> None:
    """Run a part in a process of its own: what damages the process ends with it. The next process takes what is left."""
    here, path = Path(__file__).parent, result_path(part, dry)
    command = [sys.executable, str(here / f"gpu_{part}.py"), *["--dry"] * dry]
    known = -1
    while len(results_of(path)) > known:
        known = -1 if again else len(results_of(path))
        try:
            done = subprocess.run([*command, *["--again"] * again], timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            print(f"{part}: more than {LIMIT} s", flush=True)
            return
        again = False
        if done.returncode in (0, 1):
            return


def table(results: dict[str, dict[str, Result]], dry: bool) -> str:
    head = "# A dry run on the CPU\n\nNothing here says anything about GPUs." if dry else "# On a GPU"
    lines = [head, "", f"`python benchmarks/gpu.py{' --dry' * dry}`, {machine(dry)}.", ""]
    for part, some in results.items():
        lines += [f"## {PARTS[part]}", "", f"`python benchmarks/gpu_{part}.py{' --dry' * dry}`", ""]
        lines += ["| probe | verdict | measured | aim | seconds |", "|---|---|---|---|--:|"]
        lines += [
            f"| {name.replace('_', ' ')} | {r.verdict} | {r.measured.replace('|', '/')} | {r.aim} | {r.seconds:.1f} |"
            for name, r in some.items()
        ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
