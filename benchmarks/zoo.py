"""The zoo: records, cuts and trains models of public libraries, and compares each with eager PyTorch.

    python benchmarks/zoo.py [--library timm] [--only REGEX] [--rows out/zoo.jsonl] [--resume]
    python benchmarks/zoo.py --markdown benchmarks/results/zoo.md        the table of the rows that there are

Every model has its time limit, in a worker process that is replaced when it crashes. Rows are written as they are made.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from zoo_sweep import Keeper, listed, progress, rows_of, serve

LIBRARIES = ("transformers", "smp", "timm", "torchvision")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", action="append", choices=(*LIBRARIES, "transformers-relatives"))
    parser.add_argument("--only", default="", help="a regular expression for the name or the group")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rows", type=Path, default=Path("out/zoo.jsonl"))
    parser.add_argument("--resume", action="store_true", help="leave out what has a row already")
    parser.add_argument("--markdown", type=Path, help="write the table of all rows, and examine nothing")
    parser.add_argument("--ours", action="store_true", help="leave out symbolic_trace and export")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.markdown:
        from zoo_table import table

        rows = list(rows_of(options.rows))
        done = {(row["library"], row["name"]) for row in rows}
        waiting = [name for library in LIBRARIES for name in listed(library) if (library, name) not in done]
        options.markdown.write_text(table(rows, waiting))
    else:
        sweep(options)


def sweep(options: Any) -> None:
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["library"], row["name"]) for row in rows_of(options.rows)} if options.resume else set()
    if not options.resume:
        options.rows.unlink(missing_ok=True)
    names = [(library, name) for library in options.library or LIBRARIES for name in listed(library)]
    random.Random(0).shuffle(names)  # so that a sweep which is cut short is a fair sample
    wanted = [pair for pair in names if pair not in done and re.search(options.only, pair[1])]
    keepers: SimpleQueue[Keeper] = SimpleQueue()
    for _ in range(options.jobs):
        keepers.put(Keeper(options.rows.with_suffix(".log"), baselines=not options.ours))
    started, lock, commit = time.time(), Lock(), _commit()
    counted = iter(range(1, len(wanted) + 1))

    def examine(pair: tuple[str, str]) -> None:
        keeper = keepers.get()
        try:
            row = keeper.examine(*pair) | {"commit": commit}
        finally:
            keepers.put(keeper)
        with lock, options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
            print(progress(row, next(counted), len(wanted), started), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(examine, wanted))
    while not keepers.empty():
        keepers.get().close()


def _commit() -> str:
    here = Path(__file__).parent
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
