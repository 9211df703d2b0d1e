"""The ranks of the tests: each runs every case in turn, together with all others, and writes a line of JSON per case: name and result.

python tests/distributed/worker.py FOLDER
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from pipecompile.distributed.messages import own_groups  # noqa: E402
from tests.distributed import (  # noqa: E402
    batch_norms,
    branches,
    cases,
    changes,
    copied_stages,
    direct,
    held,
    layouts,
    listed,
    meshes,
    overlaps,
    own_order,
    resharded,
    sharded_losses,
    shards_of_layers,
    sliced,
    tensor_kinds,
)
from tests.distributed.faults import FORK, warm  # noqa: E402
from tests.distributed.full_only import FULL_ONLY  # noqa: E402
from tests.support.quick_compiles import compile_quickly  # noqa: E402

WORLD, TIMEOUT, LIMIT = 4, 120.0, 900.0

STALLED = 100.0
"""Seconds after which a case writes to the log where its threads are: before the timeout, which says which rank is late alone."""


def main() -> None:
    """Fork the ranks, so that they import nothing, and print their exit codes."""
    folder = Path(sys.argv[1])
    warm()
    lines = [FORK.Pipe(duplex=False) for _ in range(WORLD)]
    ranks = [FORK.Process(target=_rank, args=(rank, line, folder)) for rank, (line, _) in enumerate(lines)]
    for process in ranks:
        process.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for _, line in lines:
        line.send(store.port)
    end = perf_counter() + LIMIT
    for process in ranks:
        process.join(max(0.0, end - perf_counter()))
        process.kill()
        process.join()
    print(json.dumps([process.exitcode for process in ranks]))


def _rank(rank: int, line: Connection, folder: Path) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # an abort inside gloo shows where each thread was
    torch.set_num_threads(1)
    compile_quickly(pytest.MonkeyPatch())
    store = dist.TCPStore("127.0.0.1", line.recv(), is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT))
    with (folder / f"{rank}.json").open("w") as out:
        every = cases.CASES | layouts.CASES | meshes.CASES | overlaps.CASES | batch_norms.CASES | changes.CASES
        every |= listed.CASES | direct.CASES | own_order.CASES | sharded_losses.CASES | resharded.CASES
        every |= held.CASES | shards_of_layers.CASES | sliced.CASES | tensor_kinds.CASES | branches.CASES
        every |= copied_stages.CASES
        for name, case in every.items():
            if name in FULL_ONLY and not cases.FULL:
                continue
            start, start_cpu = perf_counter(), process_time()
            faulthandler.dump_traceback_later(STALLED)
            out.write(json.dumps([name, result_of(case)]) + "\n")
            faulthandler.cancel_dump_traceback_later()
            if had_failure():  # ranks leave a step that fails at different collectives of the mesh's groups
                cases.MESHES.clear()
            seconds, cpu_seconds = perf_counter() - start, process_time() - start_cpu
            threads = len(os.listdir("/proc/self/task"))
            print(f"{name}: {seconds:.1f} s, {cpu_seconds:.1f} s of CPU, {threads} threads", flush=True)
            out.flush()
    try:
        cases.fail()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # a child of multiprocessing does not
        sys.exit(1)


def had_failure() -> bool:
    """Return whether pipelines of a mesh of the cases have failed, on any rank. All ranks call this."""
    groups = [group for mesh in cases.MESHES.values() for group in mesh.get_all_groups()]
    failed = torch.tensor(any(group in own_groups._DROPS for group in groups), dtype=torch.int64)
    dist.all_reduce(failed)
    return bool(failed)


def result_of(case: Callable[[], Any]) -> Any:
    try:
        return case()
    except Exception:
        return {"raised": traceback.format_exc()}


if __name__ == "__main__":
    main()
