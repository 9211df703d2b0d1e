"""The two levels below the plan: a *schedule* says in which order each device computes; a *program* says everything
that it does. Plain frozen data, no torch.

    schedule := row per device                       row     := action ("," action)*
    action   := STAGE KIND MICROBATCH                KIND    := "F" | "R" | "B" | "I" | "W"     2F0

    program  := header route* tie* (device instruction*)*     one a line; program_text.py shows and reads it
    value    := NAME "#" MICROBATCH                  an activation, or what a stage saved:
                                                     "@s" for its backward, "@s.w" for W, "@s.r" for R
              | NAME "'" CONSUMER "#" MICROBATCH     the gradient of NAME that stage CONSUMER (or "host") computed
    operand  := value [ "[" SLOT "]" ]               SLOT numbers the buffers of one NAME on one device
    instruction := action operand* "->" operand*     compute
                 | "SEND" operand "to" PEER          PEER is a device, or "host", where inputs and outputs live
                 | "RECV" operand "from" PEER
                 | "FREE" operand                    the last use is over
                 | "BROADCAST" TIE                   the home of a tied parameter shows its value to the other devices
                 | "REDUCE" TIE                      the gradients of all devices are added up at the home

`schedule_csv.py` reads schedules; routes, which a program serves, are in `routes.py`.
"""

from __future__ import annotations

from pipecompile.ir.action import Action, Kind
from pipecompile.ir.program import Instruction, Op, Operand, Program, Value, part_of, recipe, saved, weight_saved
from pipecompile.ir.routes import AUX, HOST, LOSS, TARGET, Route, Tie, chain, place
from pipecompile.ir.schedule import Schedule

__all__ = [
    "AUX",
    "HOST",
    "LOSS",
    "TARGET",
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
    "part_of",
    "place",
    "recipe",
    "saved",
    "weight_saved",
]
