"""Dumps of torch's flight recorder: the last collectives and messages that one rank has launched, and which of them are over.

    nccl_trace_rank_3       a pickle, of TORCH_FR_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT, or of `_dump_nccl_trace()`
    rank_3.json             the same as JSON, of `_dump_nccl_trace_json()`

The rank is the number at the end of the name of the file. Nothing of a file is executed: `plain_value` knows no classes and no functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from pipecompile.errors import InputError, described
from pipecompile.parameters.pure_unpickler import plain_value
from pipecompile.text.input_checks import file_path
from pipecompile.text.shown_value import shown
from pipecompile.text.text_file import cause_of

__all__ = ["CallState", "FlightDump", "FlightCall", "read_flight_dump", "read_flight_dumps"]

_MOST_BYTES = 1 << 26
"""Size of a file in bytes above which it is refused: a dump of 20,000 entries has half of it."""

_MOST_NUMBER = 1 << 62
_RANK = re.compile(r"(\d{1,9})(?:\.[A-Za-z]\w*)?$")


class CallState(IntEnum):
    """The state of a call: launched by the host, begun on the GPU, or over."""

    SCHEDULED = 0
    STARTED = 1
    COMPLETED = 2


_STATES = {state.name.lower(): state for state in CallState}


@dataclass(frozen=True, slots=True)
class FlightCall:
    """A collective or message that a rank has launched.

    `order` counts the calls of the rank, `sequence` those of its kind in the group. `nbytes` is the number of elements of a message of
    uint8, hence its bytes. `line` is the innermost line of Python, or empty.
    """

    order: int
    group: str
    description: str
    group_id: int
    name: str
    sequence: int
    is_message: bool
    state: CallState
    nbytes: int
    line: str

    @property
    def is_over(self) -> bool:
        """Whether the call has completed."""
        return self.state is CallState.COMPLETED


@dataclass(frozen=True, slots=True)
class FlightDump:
    """The calls of one rank in the order of their launch. `members` are the ranks of each group, by its name.

    `has_starts` says whether the recorder has noted when calls began on the GPU (TORCH_NCCL_ENABLE_TIMING=1).
    """

    rank: int
    calls: tuple[FlightCall, ...]
    members: Mapping[str, tuple[int, ...]]
    has_starts: bool


def read_flight_dumps(paths: Sequence[str | Path]) -> dict[int, FlightDump]:
    """Return the dumps by rank. A folder stands for the files in it. Raise InputError for a file that is not a dump, or a rank twice."""
    files = [file for path in paths for file in _files(file_path("dumps", path))]
    if not files:
        raise InputError("there is no dump", hint="pipecompile hang /tmp/nccl_trace_rank_* --program out/program.txt")
    dumps: dict[int, FlightDump] = {}
    for file in files:
        dump = read_flight_dump(file)
        if dump.rank in dumps:
            raise InputError(f"two dumps are of rank {dump.rank}", where=str(file), hint="the dumps of one run")
        dumps[dump.rank] = dump
    return dict(sorted(dumps.items()))


def _files(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    except OSError as error:
        raise InputError("the folder of dumps cannot be read", where=str(path), why=cause_of(error)) from None


def read_flight_dump(path: str | Path) -> FlightDump:
    """Return the dump in a file. Raise InputError for a file that is none; execute nothing."""
    file = file_path("dumps", path)
    match = _RANK.search(file.name)
    if match is None:
        raise InputError("the name of the dump has no rank", where=str(file), hint="nccl_trace_rank_0")
    try:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError("the dump cannot be read", where=str(file), why=error.strerror or str(error)) from None
    if len(content) > _MOST_BYTES:
        raise InputError(
            "the file is too long for a dump", where=str(file), why=f"it has more than {_MOST_BYTES:,} bytes"
        )
    try:
        return _dump_of(int(match[1]), _decoded(content))
    except Exception as error:  # a damaged pickle raises anything
        raise InputError(
            "the file is not a dump of a flight recorder", where=str(file), why=described(error),
            hint="the file that torch wrote, whole",
        ) from None  # fmt: skip


def _decoded(content: bytes) -> Any:
    if content[:1] in b"{[ \n" and content[:1]:
        return msgspec.json.decode(content)
    return plain_value(content)


def _dump_of(rank: int, data: Any) -> FlightDump:
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        raise TypeError(f"it has no list of entries, but {shown(data)}")
    version = data.get("version")
    if not isinstance(version, str) or not version.startswith("2."):
        raise ValueError(f"its version is {shown(version)}, and versions 2.x are known")
    calls = sorted((_call(entry) for entry in data["entries"]), key=lambda call: call.order)
    config = data.get("pg_config")
    groups = config if isinstance(config, dict) else {}
    members = {name: _members(group) for name, group in groups.items() if isinstance(name, str)}
    has_starts = any(
        entry.get("time_discovered_started_ns") or entry["state"] == "started" for entry in data["entries"]
    )
    return FlightDump(rank, tuple(calls), members, has_starts)


def _members(group: Any) -> tuple[int, ...]:
    """Return the ranks of a group, which torch writes as the text "[0, 1]"; none if they cannot be read."""
    try:
        return tuple(msgspec.json.decode(group["ranks"], type=list[int]))
    except (TypeError, KeyError, msgspec.MsgspecError):
        return ()


def _call(entry: Any) -> FlightCall:
    """Return an entry. Only what is read of it is looked at: containers of a hostile file may hold one another."""
    if not isinstance(entry, dict):
        raise TypeError(f"an entry is {shown(entry)}")
    group, name, is_message = entry["process_group"], _text(entry, "profiling_name"), entry["is_p2p"]
    if not (isinstance(group, list | tuple) and len(group) == 2 and all(isinstance(part, str) for part in group)):
        raise ValueError(f"process_group is {shown(group)}")
    return FlightCall(
        _number(entry, "record_id"), group[0], group[1], _number(entry, "pg_id"), name,
        _number(entry, "p2p_seq_id" if is_message is True else "collective_seq_id"), is_message is True,
        _state(entry, name), _elements(entry.get("input_sizes")) or _elements(entry.get("output_sizes")), _line(entry.get("frames")),
    )  # fmt: skip


def _state(entry: dict[Any, Any], name: str) -> CallState:
    """Return the state. Gloo leaves it at scheduled, and retires what is over; NCCL also retires what has timed out."""
    state = _STATES.get(_text(entry, "state"))
    if state is None:
        raise ValueError(f"a state is {shown(entry['state'])}")
    return CallState.COMPLETED if name.startswith("gloo:") and entry.get("retired") is True else state


def _text(entry: dict[Any, Any], key: str) -> str:
    if not isinstance(value := entry[key], str):
        raise TypeError(f"{key} is {shown(value)}")
    return value


def _number(entry: dict[Any, Any], key: str) -> int:
    value = entry[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_NUMBER:
        raise TypeError(f"{key} is {shown(value)}")
    return value


def _elements(sizes: Any) -> int:
    """Return the number of elements of the first tensor, of one dimension as messages have it; 0 for others."""
    first = sizes[0] if isinstance(sizes, list) and sizes else None
    one = first[0] if isinstance(first, list) and len(first) == 1 else 0
    return one if isinstance(one, int) and 0 <= one < _MOST_NUMBER else 0


def _line(frames: Any) -> str:
    """Return the innermost line of Python, as torch lists frames from there."""
    frame = frames[0] if isinstance(frames, list) and frames else None
    if not isinstance(frame, dict) or not isinstance(frame.get("filename"), str):
        return ""
    return f"{frame['filename'][:200]}:{shown(frame.get('line'))}"
