"""Run the Python of pages on the ranks of torchrun, from top to bottom, as one script, in a folder of its own.

torchrun --standalone --nproc-per-node=2 tests/support/page_on_ranks.py docs/distributed.md docs/rank_state.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.quick_compiles import compile_quickly

SMALLER = {"(2, 4)": "(1, 2)", "(2, 2, 4)": "(1, 1, 2)", ", 4, ": ", 2, ", ", 8, ": ", 4, "}
"""Meshes and numbers of stages of the pages, and those for two ranks."""


def main() -> None:
    torch.set_num_threads(1)
    compile_quickly(pytest.MonkeyPatch())
    namespace: dict[str, object] = {"__name__": "pages"}
    print(f"{sum(run(Path(page), namespace) for page in sys.argv[1:])} blocks")
    dist.barrier()
    dist.destroy_process_group()


def run(page: Path, namespace: dict[str, object]) -> int:
    """Run the blocks of a page. Return how many there are."""
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    for block in blocks:
        source = block[1]
        if "TCPStore" in source:  # a second start of the ranks
            dist.destroy_process_group()
        for large, small in SMALLER.items():
            source = source.replace(f'"cpu", {large}', f'"cpu", {small}')
            for model in ("model", "large", "positional"):
                source = source.replace(f"{model}{large}", f"{model}{small}")
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + source, str(page), "exec"), namespace)
    return len(blocks)


if __name__ == "__main__":
    main()
