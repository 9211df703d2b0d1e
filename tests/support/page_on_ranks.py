"""Run the Python of a page on the ranks of torchrun, from top to bottom, in a folder of their own.

torchrun --standalone --nproc-per-node=2 tests/support/page_on_ranks.py docs/distributed.md
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
"""Meshes and numbers of stages of the page, and those for two ranks."""


def main() -> None:
    page = Path(sys.argv[1])
    text = page.read_text(encoding="utf-8")
    torch.set_num_threads(1)
    compile_quickly(pytest.MonkeyPatch())
    namespace: dict[str, object] = {"__name__": page.stem}
    found = list(re.finditer(r"^```python[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    for block in sorted(found, key=lambda block: "TCPStore" in block[1]):  # a second start of the ranks: last
        source = block[1]
        if "TCPStore" in source:
            dist.destroy_process_group()
        for large, small in SMALLER.items():
            source = source.replace(f"model{large}", f"model{small}").replace(f'"cpu", {large}', f'"cpu", {small}')
            source = source.replace(f"large{large}", f"large{small}").replace(
                f"positional{large}", f"positional{small}"
            )
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + source, str(page), "exec"), namespace)
    dist.barrier()
    dist.destroy_process_group()
    print(f"{len(found)} blocks")


if __name__ == "__main__":
    main()
