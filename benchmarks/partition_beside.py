"""The partitioner beside an earlier revision of this repository: seconds, and what is proven, in one run.

    python benchmarks/partition_beside.py REVISION [--rounds 3] [--time-limit 30] [--networks resnet unet]
        [--markdown benchmarks/results/partition_beside.md]

Both versions take turns, each time in a new process, on the reference problems of `benchmarks/partition.py` and on some networks of
`benchmarks/partition_models.py`. Both search for the complete proof (`gap=0`). Seconds are CPU seconds, the least of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.earlier_tree import ROOT, earlier_tree
from benchmarks.partition import REFERENCE
from benchmarks.partition_models import MODELS, problem_of

SOLVE = """
import inspect, json, sys
from time import process_time
from pipecompile.errors import InfeasibleError
from pipecompile.partitioners import Problem, partition
complete = {"gap": 0} if "gap" in inspect.signature(partition).parameters else {}
found = []
for path, n_stages in json.loads(sys.argv[1]):
    problem, begin = Problem.load(path), process_time()
    try:
        cut = partition(problem, n_stages, time_limit=float(sys.argv[2]), **complete)
        found.append((process_time() - begin, cut.bottleneck, cut.lower_bound, cut.status == "optimal"))
    except InfeasibleError:
        found.append((process_time() - begin, None, None, True))
print(json.dumps(found))
"""

Found = tuple[float, float | None, float | None, bool]
"""CPU seconds, bottleneck, bound, and whether the cut is proven optimal; no bottleneck where it is proven that no cut fits."""

VERSIONS = ("earlier", "today")


def solve(tree: Path, cases: list[tuple[str, int]], time_limit: float) -> list[Found]:
    """Return what the version in a folder finds, one result per case of a file and a number of stages."""
    command = [sys.executable, "-c", SOLVE, json.dumps(cases), str(time_limit)]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True, capture_output=True, text=True
    )
    return [tuple(one) for one in json.loads(done.stdout.splitlines()[-1])]


def problems(folder: Path, networks: list[str]) -> list[Path]:
    """Return the files of the reference problems, and of the networks whose names contain one of the words."""
    files = sorted(REFERENCE.glob("*.json"))
    for name in MODELS:
        if any(word in name for word in networks):
            files.append(folder / f"{name}.json")
            problem_of(name)[0].save(files[-1])
    return files


def page(header: str, files: list[Path], best: dict[str, dict[tuple[str, int], Found]]) -> str:
    """Return the table as markdown, a line per file."""
    lines = ["# Partitioner beside an earlier revision", "", header, ""]
    lines += [
        "| problem | K | proven, earlier | today | CPU s, earlier | today | worst case, earlier | today |",
        "|---" * 8 + "|",
    ]
    for path in files:
        keys = [key for key in best["today"] if key[0] == str(path)]
        both = [[best[version][key] for key in keys] for version in VERSIONS]
        proven = [f"{sum(one[3] for one in found)} of {len(found)}" for found in both]
        total = [f"{sum(one[0] for one in found):.2f}" for found in both]
        worst = [f"{max(one[0] for one in found):.2f}" for found in both]
        stages = [key[1] for key in keys]
        lines.append(f"| {path.stem} | {min(stages)} to {max(stages)} | {' | '.join([*proven, *total, *worst])} |")
    lost = [key for key, found in best["earlier"].items() if found[3] and not best["today"][key][3]]
    slower = [key for key, one in best["earlier"].items() if (best["today"][key][1] or 0) > (one[1] or 0) * (1 + 1e-6)]
    lines += ["", f"Proven earlier and not today: {len(lost)}. Slower slowest stage today: {len(slower)}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--networks", nargs="*", default=["resnet", "densenet", "unet", "transformer"])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    best: dict[str, dict[tuple[str, int], Found]] = {version: {} for version in VERSIONS}
    with tempfile.TemporaryDirectory() as folder, earlier_tree(options.revision) as earlier:
        files = problems(Path(folder), options.networks)
        cases = [(str(path), n_stages) for path in files for n_stages in options.stages]
        for _ in range(options.rounds):
            for version, tree in zip(VERSIONS, (earlier, ROOT), strict=True):
                for case, found in zip(cases, solve(tree, cases, options.time_limit), strict=True):
                    best[version][case] = min(best[version].get(case, found), found, key=lambda one: one[0])
    command = f"`python benchmarks/partition_beside.py {options.revision} --rounds {options.rounds} --time-limit {options.time_limit:g}`"
    header = f"{command}, Python {platform.python_version()}, {platform.machine()}: CPU seconds with `gap=0`, the least of the rounds."
    text = page(header, files, best)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
