"""The overhead of small cells beside an earlier revision of this repository, in one run.

    python benchmarks/overhead_beside.py REVISION [--rounds 3] [--markdown benchmarks/results/overhead_beside.md]

Both versions take turns, each time in a new process, with the functions of their own `benchmarks/overhead.py`. The first table
has microseconds of CPU time a cell beyond the plain loop of the same process: the median of the rounds, and all of them. Processes
of one version differ by several microseconds. The second table counts what Python runs in a step, which no noise changes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.earlier_tree import ROOT, earlier_tree

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
COUNT = """
import json, sys
import torch
import overhead
torch.set_num_threads(1)
x, target = torch.randn(64, 64), torch.randint(0, 64, (64,))
found = {}
def trace(frame, event, _):
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    counts[0] += event == "opcode"
    return trace
def profile(_frame, event, _):
    counts[1] += event in ("call", "c_call")
for mode in json.loads(sys.argv[1]):
    for name in overhead.SCHEDULES:
        step = overhead.ours(overhead.mlp(), x, target, 4, 8, schedule=name, checkpoint=mode)
        for _ in range(5):
            step()
        counts = found[f"{name}, checkpoint={mode}"] = [0, 0]
        sys.settrace(trace), step(), sys.settrace(None)
        sys.setprofile(profile), step(), sys.setprofile(None)
print(json.dumps(found))
"""
"""Counts of the bytecodes that a step executes, and of the functions that it calls, those of C among them."""


def run(tree: Path, code: str, *arguments: str) -> dict[str, Any]:
    """Return what a piece of Python prints as JSON, by schedule and checkpoint mode, with the version in a folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "benchmarks")])}
    command = [sys.executable, "-c", code, json.dumps(MODES), *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def counted(revision: str, counts: dict[str, dict[str, list[int]]]) -> list[str]:
    """Return the lines of the table of counts."""
    lines = [f"| one step | bytecodes of {revision} | today | calls of {revision} | today |", "|---|--:|--:|--:|--:|"]
    for name, (opcodes, calls) in counts["today"].items():
        earlier_opcodes, earlier_calls = counts["earlier"][name]
        lines.append(f"| {name} | {earlier_opcodes:,} | {opcodes:,} | {earlier_calls:,} | {calls:,} |")
    return lines


def page(revision: str, rounds: dict[str, list[dict[str, float]]], counts: dict[str, dict[str, list[int]]]) -> str:
    """Return the tables as markdown."""
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
    return "\n".join([*lines, "", *counted(revision, counts)]) + "\n"


def main() -> None:
    """Measure both versions in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=15, help="turns of the contenders in one process")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    with earlier_tree(options.revision) as earlier:
        for _ in range(options.rounds):
            for name, tree in (("earlier", earlier), ("today", ROOT)):
                rounds[name].append(run(tree, MEASURE, str(options.repeats)))
        counts = {name: run(tree, COUNT) for name, tree in (("earlier", earlier), ("today", ROOT))}
    text = page(options.revision, rounds, counts)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
