"""Scripts on several ranks, started by torchrun as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, script: Path | str, *options: str, cwd: Path | None = None, timeout: float = 300.0) -> str:
    """Return what a script prints on so many ranks, on CPU.

    If one fails, the error ends with what the ranks wrote to stderr, the stacks of an abort among it: the report of torchrun stands
    before, since a log of tests is often cut at its beginning.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    done = subprocess.run([*launch, *options], cwd=cwd, env=os.environ | environment, capture_output=True,
                          encoding="utf-8", timeout=timeout, check=False)  # fmt: skip
    of_ranks, _, of_launcher = done.stderr.partition('Traceback (most recent call last):\n  File "<frozen runpy>"')
    assert done.returncode == 0, f"{of_launcher}\n{of_ranks}"
    return done.stdout
