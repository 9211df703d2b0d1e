"""Passes: one per file, each a pure function from frozen data to frozen data.

    schedule ──▶ schedule    split_backward, insert_recompute, advance_recompute, insert_offload, insert_overlap, insert_sharding
    schedule ──▶ program     the lowering: lower_actions, then one pass per kind of instruction

Open `lowering.py` first: it lists the passes of the lowering in order, each with the level that its result must reach.
The text form of a schedule is CSV, that of a program is described in `ir`; the verifier of a level runs after each
pass. This folder is free of torch.
"""

from __future__ import annotations

from pipecompile.ir.pass_manager import Hook, Pass, PassManager, Step, watch
from pipecompile.passes.lowering import lower, lowering

__all__ = ["Hook", "Pass", "PassManager", "Step", "lower", "lowering", "watch"]
