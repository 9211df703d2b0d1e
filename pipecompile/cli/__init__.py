"""The command line: a thin skin over `explain`, `compile`, `build_schedule` and `simulate`.

    pipecompile check MODEL --input 32x3x224x224
    pipecompile plan|simulate|run MODEL --input 32x3x224x224 --stages 4 ...
    pipecompile schedule 1f1b --stages 4 --microbatches 8

stdout carries the result and nothing else (what a model prints goes to stderr); errors go to stderr without a
traceback. Exit codes: 0 good, 1 failed otherwise, 2 usage, 3 the model cannot be traced, 4 no cut fits. torch is
imported by the commands that need it, never for `--help`.
"""

from __future__ import annotations

from pipecompile.cli.commands import app, main

__all__ = ["app", "main"]
