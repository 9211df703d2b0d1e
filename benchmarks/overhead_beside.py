"""The overhead of small cells beside an earlier revision of this repository, in one run.

    python benchmarks/overhead_beside.py REVISION [--rounds 3] [--markdown benchmarks/results/overhead_beside.md]

Both versions take turns, each time in a new process, with the functions of their own `benchmarks/overhead.py`. The table has
microseconds of CPU time a cell beyond the plain loop of the same process: the median of the rounds, and all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
MODES = ("never", "always")
MEASURE = """
import json, statistics, sys
import torch
import overhead
torch.set_num_threads(1)
torch.manual_seed(0)
found = {}
for mode in json.loads(sys.argv[1]):
    times = overhead.small(int(sys.argv[2]), mode)
    for name in overhead.SCHEDULES:
        pairs = zip(times[name], times["plain loop"], strict=True)
        found[f"{name}, checkpoint={mode}"] = statistics.median(a - b for a, b in pairs) / 32 * 1e6
print(json.dumps(found))
"""


def measured(tree: Path, repeats: int) -> dict[str, float]:
    """Return microseconds a cell beyond the plain loop, by schedule and checkpoint mode, of the version in a folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "benchmarks")])}
    command = [sys.executable, "-c", MEASURE, json.dumps(MODES), str(repeats)]
    done = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(revision: str, rounds: dict[str, list[dict[str, float]]]) -> str:
    """Return the table as markdown."""
    earlier, today = (rounds[name] for name in ("earlier", "today"))
    lines = [
        "# Overhead beside an earlier revision",
        "",
        f"`python benchmarks/overhead_beside.py {revision} --rounds {len(today)}`, torch {torch.__version__}, one thread: microseconds a cell",
        "beyond the plain loop, the median of the rounds and all of them. The two versions take turns.",
        "",
        f"| 8 x (Linear 64 + ReLU), 4 stages x 8 micro-batches | {revision} | today | rounds of {revision} | rounds of today |",
        "|---|--:|--:|---|---|",
    ]
    for name in today[0]:
        pairs = [[one[name] for one in found] for found in (earlier, today)]
        medians = [f"{statistics.median(values):.1f}" for values in pairs]
        lines.append(f"| {' | '.join([name, *medians, *(' '.join(f'{v:.0f}' for v in values) for values in pairs)])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure both versions in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=15, help="turns of the contenders in one process")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder) / "earlier"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(earlier), options.revision], check=True)
        try:
            for _ in range(options.rounds):
                rounds["earlier"].append(measured(earlier, options.repeats))
                rounds["today"].append(measured(ROOT, options.repeats))
        finally:
            subprocess.run([*git, "remove", "--force", str(earlier)], check=True)
    text = page(options.revision, rounds)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
