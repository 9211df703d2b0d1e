"""The intermediate representations: frozen dataclasses without torch, each with a text form and a parser.

    plan       stage of every node, device of every stage      plan.py             JSON
    schedule   order of computation per device                 schedule.py         CSV, read by schedule_csv.py
    program    everything that each device does                program.py          text, read by program_text.py
    timeline   spans of time per device                        timeline.py

Open `schedule.py` first. Routes, which a plan decides and a program serves, are in `routes.py`. Verifiers are in
`verifiers`, passes in `passes`. Grammar of a schedule and of a program:

    schedule := row per device                       row     := cell ("," cell)*
    cell     := action | "(" action ";" action ")OVERLAP_F_B"               F with B or I, at the same time
    action   := STAGE KIND MICROBATCH ["." SLICE]    KIND    := "F" | "R" | "B" | "I" | "W" | "OFFLOAD" | "RELOAD"     2F0
              | STAGE SHARDING                       SHARDING := "UNSHARD" | "RESHARD" | "REDUCE_GRAD"             2UNSHARD

    program  := header direction* route* tie* (device instruction*)*     one per line
    direction := "direction: devices" DEVICE* ", micro-batches" MICROBATCH*     further copies of all stages
    value    := NAME "#" MICROBATCH                  an activation, or what stage s saves:
                                                     "@s" for its backward, "@s.w" for W, "@s.r" for R,
                                                     "@s.o" for OFFLOAD, and "@s.h", on the host, for RELOAD;
                                                     "@s.k" are keys and values of a slice, for later slices
              | NAME "'" CONSUMER "#" MICROBATCH     the gradient of NAME that stage CONSUMER (or "host") computes
    operand  := value [ "[" SLOT "]" ]               SLOT numbers the buffers of one NAME on one device
    instruction := ["OVERLAP"] action operand* "->" operand*     compute; OVERLAP: at the same time as the next instruction
                 | "SEND" operand "to" PEER          PEER is a device, or "host", where inputs and outputs live
                 | "RECV" operand "from" PEER
                 | "FREE" operand                    after the last use
                 | "BROADCAST" TIE                   copy a tied parameter from its home device to the others
                 | "REDUCE" TIE                      add the gradients of all devices on the home device
"""

from __future__ import annotations

from pipecompile.ir.action import BACKWARDS, NO_MICROBATCH, NO_SLICE, SHARDING, UNTRAINED, Action, Kind
from pipecompile.ir.program import (
    Instruction,
    Op,
    Operand,
    Program,
    Value,
    held,
    keys_values,
    offloaded,
    part_of,
    recipe,
    saved,
    weight_saved,
)
from pipecompile.ir.routes import AUX, HOST, LOSS, TARGET, Route, Tie, chain, place
from pipecompile.ir.schedule import Schedule

__all__ = [
    "BACKWARDS",
    "AUX",
    "HOST",
    "LOSS",
    "NO_MICROBATCH",
    "NO_SLICE",
    "SHARDING",
    "TARGET",
    "UNTRAINED",
    "Action",
    "Instruction",
    "Kind",
    "Op",
    "Operand",
    "Program",
    "Route",
    "Schedule",
    "Tie",
    "Value",
    "chain",
    "held",
    "keys_values",
    "offloaded",
    "part_of",
    "place",
    "recipe",
    "saved",
    "weight_saved",
]
