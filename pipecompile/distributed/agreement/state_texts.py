"""The state that a recording reads, as processes can compare it: a key per label, equal for equal values, and a text to show.

    model.scale       2.0                        key "2.0"                          text 2.0
    Net.forward       <code object forward>      key of its bytecode and constants  text forward (net.py:12)
    model.cfg         an object                  key and text: its class

Objects count by their class, since what is read of them has labels of its own; hooks by their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import PurePath
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from pipecompile.distributed.agreement.collective_call import sample_of
from pipecompile.text.shown_value import shown
from pipecompile.tracing.guards.read_state import ReadState

__all__ = ["attributes", "fixed_keys", "key_of", "live_keys", "text_of"]

_NUMBERED = re.compile(r" \(\d+\)")
"""A number that tells functions of one name apart, in the order in which they were met."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def fixed_keys(state: ReadState) -> dict[str, str]:
    """Return a key per label of the values that a recording contains, without labels that depend on the order of a set: each process
    has its own.
    """
    arrays = {label: _digest(content) for label, _, content in state.arrays}
    sets = tuple(f"{label}[" for label, value in state.values.items() if _is_set(value))
    named = {
        label: value
        for label, value in state.values.items()
        if not label.startswith(sets) and not _NUMBERED.search(label)
    }
    return {label: key_of(value) for label, value in named.items() if not _is_repeated(value)} | arrays


def _is_set(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and value[0] in (set, frozenset)


def _is_repeated(value: Any) -> bool:
    """Return whether a value stands for another label that was met before, which depends on the order as well."""
    return isinstance(value, str) and value.startswith("the same as ")


def live_keys(tensors: Iterable[tuple[str, torch.Tensor]], numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return a key per label of what a recording reads at every run: tensors, and lifted `numbers`."""
    samples = {label: sample_of(one, is_due=False) for label, one in tensors}
    keys = {label: key_of(number) for label, number in numbers.items()}
    return keys | {label: _digest(sample) for label, sample in samples.items() if sample}


def attributes(state: ReadState, buffers: Iterable[torch.Tensor]) -> tuple[tuple[str, torch.Tensor], ...]:
    """Return the tensors that a recording reads and that are neither parameters nor these buffers, by label."""
    known = {*map(id, buffers)}
    plain = ((label, one) for label, one in state.tensors if not isinstance(one, nn.Parameter))
    return tuple((label, one) for label, one in plain if id(one) not in known)


def key_of(value: Any) -> str:
    """Return a text that is equal in two processes for equal values."""
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, FunctionType | CodeType):
        return _digest(_content(value.__code__ if isinstance(value, FunctionType) else value).encode())
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        return f"{value[0].__qualname__} of {len(value[1])}"  # a container, as ReadState has it: its class and its keys
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def text_of(value: Any) -> str:
    """Return a value as a message shows it."""
    code = value.__code__ if isinstance(value, FunctionType) else value
    if isinstance(code, CodeType):
        return f"{code.co_qualname} ({PurePath(code.co_filename).name}:{code.co_firstlineno})"
    return shown(value) if type(value) in _PLAIN else key_of(value)


def _content(code: CodeType) -> str:
    """Return what code does, without the lines where it is written."""
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {[*map(_constant, code.co_consts)]}"


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _content(value)
    if isinstance(value, frozenset):  # its order is that of hashes, which each process has of its own
        return str(sorted(map(_constant, value)))
    return str([*map(_constant, value)]) if isinstance(value, tuple) else repr(value)


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=6).hexdigest()
