"""The command line over `explain`, `compile`, `build_schedule` and `simulate`; open commands.py first.

    pipecompile check MODEL --input 32x3x224x224
    pipecompile check schedule.csv --repair mended.csv
    pipecompile plan|simulate|run|bench MODEL --input 32x3x224x224 --stages 4 ...
    pipecompile schedule 1f1b --stages 4 --microbatches 8
    pipecompile hang dumps --program out/program.txt

stdout has only the result; output of the model and errors, without a traceback, go to stderr. Exit codes: 0 success, 1 other
failures, 2 usage, 3 the model cannot be traced, 4 no cut fits, 5 a pipeline in a file has a fault or deadlocks, 130 Ctrl-C.
Commands import torch when they need it; `--help` does not.
"""

from __future__ import annotations

from pipecompile.cli.commands import app, main

__all__ = ["app", "main"]
