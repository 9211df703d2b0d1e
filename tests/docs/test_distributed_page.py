"""docs/distributed.md: its code runs on two ranks, from top to bottom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_code_of_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    page = ROOT / "docs" / "distributed.md"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(ROOT / "tests" / "support" / "page_on_ranks.py"), str(page)]
    done = subprocess.run([*launch, *script], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    blocks = page.read_text(encoding="utf-8").count("```python")
    assert done.stdout.count(f"{blocks} blocks") == 2, done.stdout  # lines of two ranks may run into each other
    assert (tmp_path / "out" / "00000100" / ".metadata").exists()
    assert (tmp_path / "out" / "timeline.json").exists()
