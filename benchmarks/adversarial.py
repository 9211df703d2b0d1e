"""The adversarial zoo: models of public libraries with their randomness on, changed between steps, beside a twin in plain eager.

    python benchmarks/adversarial.py [--library diffusers] [--only REGEX] [--rows out/adversarial.jsonl] [--resume] [--sample 20]
    python benchmarks/adversarial.py --markdown benchmarks/results/adversarial.md        the table of the rows that there are

The table keeps the rows that it has for models that have no new row.

Every model has a process of its own, with a time limit. A library that is not installed is left out, with that reason.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import zoo_models
from adversarial_check import examine
from adversarial_table import progress, rows_of_page, table
from zoo_models.specimen import Specimen
from zoo_sweep import rows_of

OLD = ("transformers", "smp", "timm", "torchvision")
NEW = ("foreign_vision", "foreign_language", "foreign_audio", "foreign_science")
LIMIT = 120
"""Seconds for one model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", action="append", help="a family of models, or the name of a library")
    parser.add_argument("--only", default="", help="a regular expression for the name")
    parser.add_argument("--rows", type=Path, default=Path("out/adversarial.jsonl"))
    parser.add_argument("--resume", action="store_true", help="leave out what has a row already")
    parser.add_argument(
        "--sample", type=int, default=0, help="so many models of each library of the old zoo; 0 for all"
    )
    parser.add_argument("--markdown", type=Path, help="write the table of all rows, and examine nothing")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one model")
    options = parser.parse_args()
    if options.markdown:
        page = options.markdown.read_text() if options.markdown.exists() else ""
        options.markdown.write_text(table([*rows_of_page(page), *rows_of(options.rows)]))
    else:
        sweep(options)


def sweep(options: Any) -> None:
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["library"], row["name"]) for row in rows_of(options.rows)} if options.resume else set()
    torch.set_num_threads(1)
    started = time.time()
    for family in (*NEW, *OLD):
        names = _names(family)
        if family in OLD and options.sample:
            names = random.Random(0).sample(names, min(options.sample, len(names)))
        for library, name in names:
            wanted = not options.library or {family, library} & set(options.library)
            if not wanted or (library, name) in done or not re.search(options.only, name):
                continue
            row = examined(family, name, options.limit) | {"library": library, "name": name}
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(progress(row, time.time() - started), flush=True)


def _names(family: str) -> list[tuple[str, str]]:
    """Return library and name of each model of a family, asked of a process of its own."""
    pairs = _asked(_list, (family,), 300)
    return [tuple(pair) for pair in pairs[0]] if pairs else []


def _list(family: str, told: Connection) -> None:
    told.send([(s.library, s.name) for s in zoo_models.specimens(family)])


def examined(family: str, name: str, limit: float) -> dict[str, Any]:
    """Return what one model tells before the time limit."""
    row: dict[str, Any] = {}
    start = time.time()
    for event in _asked(_examine, (family, name), limit):
        row.update(event)
    if row.get("phase") not in ("done", None) and "skipped" not in row:
        row["ended"] = f"killed in {row['phase']} after {limit:.0f} s, or crashed"
    return row | {"seconds": round(time.time() - start, 1)}


def _asked(work: Any, args: tuple[Any, ...], limit: float) -> list[Any]:
    """Return what `work` sends from a process that is killed after `limit` seconds."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(*args, theirs), daemon=False)
    process.start()
    theirs.close()
    found, end = [], time.time() + limit
    try:
        while ours.poll(max(0.0, end - time.time())):
            found.append(ours.recv())
    except EOFError:
        pass
    process.kill()
    process.join()
    return found


def _examine(family: str, name: str, told: Connection) -> None:
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)  # libraries print
        if not os.environ.get("ADVERSARIAL_STDERR"):
            os.dup2(nothing.fileno(), 2)
    warnings.filterwarnings("ignore")
    specimen = next(s for s in zoo_models.specimens(family) if s.name == name)
    specimen = specimen.smaller or specimen
    if not _is_there(specimen, told):
        return
    examine(specimen, lambda **event: told.send(event))


def _is_there(specimen: Specimen, told: Connection) -> bool:
    try:
        torch.manual_seed(0)
        specimen.build()
    except ImportError as error:
        told.send({"skipped": f"not installed: {error}"[:200]})
        return False
    except Exception as error:
        told.send({"skipped": f"cannot be built: {type(error).__name__}: {error}"[:200]})
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
