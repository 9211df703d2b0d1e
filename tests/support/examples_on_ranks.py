"""Run scripts of examples/ one after the other on the ranks of one torchrun, as if each had been started by a torchrun of its own.

torchrun --standalone --nproc-per-node=2 tests/support/examples_on_ranks.py '[[1, "train_copies.py", "--epochs", "2"]]'

Each run is its number of ranks, the script, and the options of the script. The first rank prints a line `run N` before the run N.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.quick_compiles import compile_quickly

EXAMPLES = Path(__file__).parents[2] / "examples"


def main() -> None:
    sys.path.insert(0, str(EXAMPLES))
    compile_quickly(pytest.MonkeyPatch())
    rank, host = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    shared, stores = TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False), []
    for number, (n_ranks, name, *options) in enumerate(json.loads(sys.argv[1])):
        if rank == 0:
            stores.append(
                TCPStore(host, 0, is_master=True, wait_for_workers=False)
            )  # of this run alone, as torchrun's is
            shared.set(f"port {number}", str(stores[-1].port))
            print(f"run {number}", flush=True)
        os.environ |= {"WORLD_SIZE": str(n_ranks), "MASTER_PORT": shared.get(f"port {number}").decode()}
        if rank < n_ranks:
            sys.argv[0:] = [name, *options]
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shared.set(f"rank {rank} is done", "")
    shared.wait([f"rank {other} is done" for other in range(int(os.environ["LOCAL_WORLD_SIZE"]))])


if __name__ == "__main__":
    main()
