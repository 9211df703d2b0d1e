"""Schedules: the order of actions on each device. One builder a file; `build_schedule` finds a builder by name.

    stages per device    1       1f1b, eager-1f1b, zb-h1, zb-h2, zb-1p, zb-2p, 2bp, ooo-backprop, gpipe-remat, mario, checkpoint-window
                         2       zbv, v-half, v-two-thirds, v-min, dualpipev, dualpipev-overlap: in a V; po-half: in a loop
                         any     gpipe, sequential, interleaved, llama3, looped-bfs, interleaved-zb, po-full, forward: in a loop;
                                 hanayo: to and fro
    copies of each stage                 chimera, dualpipe: two, one per direction
    slices of micro-batches              seq1f1b: one stage per device; seq1f1b-interleaved, terapipe: any number of stages

`auto_schedule` (search/) finds a schedule for given costs and memory. Builders return actions only; passes add communication.
The text form of a schedule is the CSV of `ir/schedule_csv.py`, its verifier `verifiers/schedule.py`. Open `one_f_one_b.py` first,
then `catalogue.py`.
"""

from __future__ import annotations

from pipecompile.schedules.catalogue import (
    CATALOGUE,
    Builder,
    CatalogueEntry,
    build_schedule,
    compared_names,
    register_schedule,
)
from pipecompile.schedules.search.auto import auto_schedule

__all__ = [
    "CATALOGUE",
    "Builder",
    "CatalogueEntry",
    "auto_schedule",
    "build_schedule",
    "compared_names",
    "register_schedule",
]
