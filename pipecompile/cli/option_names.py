"""Errors speak of arguments of `pipecompile.compile`; who typed options reads options.

n_stages=5, or checkpoint="auto"        --stages 5, or --checkpoint auto
memory_limit=(100, 200)                 --memory-limit 100,200
speeds lists 2 of 4 devices             --speeds lists 2 of 4 devices
"""

from __future__ import annotations

import re
from dataclasses import fields

from pipecompile.cli.compile_options import Request

__all__ = ["as_options"]

_OPTIONS = {"n_stages": "--stages", "n_microbatches": "--microbatches", "n_devices": "--devices"} | {
    field.name: "--" + field.name.replace("_", "-") for field in fields(Request)
}
_ANY = "|".join(_OPTIONS)
_GIVEN = re.compile(rf"\b({_ANY})=(\([^)]*\)|\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[^\s,;]*)")
_NAMED = re.compile(rf"\A({_ANY})\b(?!-)|(?<![-\w])({'|'.join(name for name in _OPTIONS if '_' in name)})\b")


def as_options(text: str) -> str:
    """The text with arguments as options. One that is an English word too is an argument when it has a value or comes first."""
    given = _GIVEN.sub(lambda match: f"{_OPTIONS[match[1]]} {_typed(match[2])}".rstrip(), text)
    return _NAMED.sub(lambda match: _OPTIONS[match[0]], given)


def _typed(value: str) -> str:
    """Sequences are typed with commas; a word needs no quotes."""
    return re.sub(r"\s*,\s*", ",", re.sub(r"[()\[\]\"']", "", value)).rstrip(",")
