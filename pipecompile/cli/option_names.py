"""Error messages with options of the command line: messages of `pipecompile.compile` name its keywords instead.

n_stages=5, or checkpoint="auto"        --stages 5, or --checkpoint auto
memory_limit=(100, 200)                 --memory-limit 100,200
speeds: no entry for 2 devices          --speeds: no entry for 2 devices
compile(..., n_microbatches=2)          --microbatches 2
pin={"fc": 3, "conv1": 0}               --pin fc=3,conv1=0
offload=False                           --no-offload
cuda_graphs="step"                      --cuda-graphs-step
"""

from __future__ import annotations

import re
from dataclasses import fields

from pipecompile.cli.compile_options import CompileOptions

__all__ = ["as_options"]

_OPTIONS = {
    "n_stages": "--stages",
    "n_microbatches": "--microbatches",
    "n_devices": "--devices",
    "n_ranks": "--ranks",
    "n_slices": "--slices",
} | {field.name: "--" + field.name.replace("_", "-") for field in fields(CompileOptions)}
_ANY = "|".join(_OPTIONS)
_FLAGS = [field.name for field in fields(CompileOptions) if isinstance(field.default, bool)]
_WITH_VALUE = re.compile(
    rf"\b({_ANY})=(\([^)]*\)|\{{[^}}]*\}}|\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\"[^\"]*\"|'[^']*'|[^\s,;]*)"
)
_CALL = re.compile(r"\b(?:pc\.|pipecompile\.)?compile\(\.\.\., ([^()]*)\)")
_NAMED = re.compile(rf"\A({_ANY})\b(?!-)|(?<![-\w])({'|'.join(name for name in _OPTIONS if '_' in name)})\b")


def as_options(text: str) -> str:
    """Return the text with options for keywords. A keyword that is an English word too is replaced if it has a value or comes first."""
    text = _CALL.sub(r"\1", text)
    text = _WITH_VALUE.sub(lambda match: _option(match[1], _typed(match[2])), text)
    return _NAMED.sub(lambda match: _OPTIONS[match[0]], text)


def _option(name: str, value: str) -> str:
    """Return an option with its value. A flag has no value: its name says whether it is set, and to what."""
    option = _OPTIONS[name]
    if name not in _FLAGS or not value:
        return f"{option} {value}".rstrip()
    return {"True": option, "False": f"--no{option[1:]}"}.get(value, f"{option}-{value}")


def _typed(value: str) -> str:
    """Return a value as typed: sequences with commas, words without quotes, entries of dicts as NAME=VALUE."""
    if value.startswith("{"):
        value = value.strip("{}").replace(": ", "=")
    return re.sub(r"\s*,\s*", ",", re.sub(r"[()\[\]\"']", "", value)).rstrip(",")
