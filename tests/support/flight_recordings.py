"""Recordings of ranks of a program, in the format of torch's flight recorder: a model of their streams, stopped by a fault.

    host       launches the messages of a row in order, and waits at the end of a step for all of them
    GPU        computes in the order of the row; a message begins when the last of its link is over and, for a SEND, its value is there
    message    is over when both ends have begun

A fault stops a host before one of its messages, a GPU in one of its actions, or a message that has begun.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipecompile.distributed.messages.row_messages import departures
from pipecompile.ir import HOST, Op, Program, Value

__all__ = ["Fault", "Recording", "Stop", "collective", "entry", "messages_of", "record", "record_gloo"]

Pair = tuple[int, int]
Key = tuple[Pair, int]
"""The link of a message, and its number on the link from 0."""


class Stop(Enum):
    """What stops: the host of a rank, its GPU, or a message."""

    HOST = "host"
    GPU = "gpu"
    MESSAGE = "message"


@dataclass(frozen=True)
class Fault:
    """A stop in step `step`, from 0, of a device: before the message `index` of its row, or in its compute instruction `index`."""

    stop: Stop
    device: int
    step: int
    index: int


@dataclass(frozen=True)
class OwnMessage:
    """A message of a row: its link, whether it is sent, its value, and its place in the row."""

    pair: Pair
    is_send: bool
    name: str
    place: int
    value: Value | None = None


def messages_of(program: Program, device: int) -> list[OwnMessage]:
    """Return the messages of a device in one step, in the order of launch."""
    found = []
    for place, one in enumerate(program.rows[device]):
        if one.op is Op.SEND and one.peer not in (None, HOST):
            found.append(OwnMessage((device, one.peer), True, str(one.reads[0].value), place, one.reads[0].value))
        if one.op is Op.RECV and one.peer not in (None, HOST):
            found.append(OwnMessage((one.peer, device), False, str(one.writes[0].value), place, one.writes[0].value))
    end = len(program.rows[device])
    for each in departures(program):
        if each.device != device:
            found.append(OwnMessage((each.device, device), False, str(each), end))
        else:
            ends = [other for other in range(program.n_devices) if other != device]
            found += [OwnMessage((device, other), True, str(each), end) for other in ends]
    return found


@dataclass
class Recording:
    """The state of all ranks: messages launched by device in order, begun by each end, over."""

    program: Program
    launched: dict[int, list[tuple[Key, OwnMessage, int]]] = field(default_factory=dict)
    begun: set[tuple[Key, bool]] = field(default_factory=set)
    over: set[Key] = field(default_factory=set)
    lost: set[Key] = field(default_factory=set)

    def first_not_over(self, device: int) -> tuple[OwnMessage, int] | None:
        """Return the first message of a device that is launched and not over, with its step."""
        return next(((message, step) for key, message, step in self.launched[device] if key not in self.over), None)

    def write(
        self, folder: Path, *, ranks: Sequence[int] | None = None, ring: int = 2000, has_timing: bool = True, before: int = 0,
        as_json: bool = False, extra: Mapping[int, Sequence[dict[str, Any]]] | None = None, is_extra_first: bool = False,
    ) -> list[Path]:  # fmt: skip
        """Write the dumps of the ranks. `before` messages of an evaluation went over each link before the steps."""
        ranks = ranks or range(self.program.n_devices)
        return [
            self._write(
                folder,
                device,
                ranks,
                ring,
                has_timing,
                before,
                as_json,
                (extra or {}).get(ranks[device], ()),
                is_extra_first,
            )
            for device in self.launched
        ]

    def _write(
        self, folder: Path, device: int, ranks: Sequence[int], ring: int, has_timing: bool, before: int, as_json: bool,
        extra: Sequence[dict[str, Any]], is_extra_first: bool,
    ) -> Path:  # fmt: skip
        pairs = sorted({message.pair for message in messages_of(self.program, device)})
        entries = [
            entry(pair, ranks, sorted(pairs).index(pair), 1, 1, pair[0] == device, "completed") for pair in pairs
        ]
        for number in range(before):
            for pair in pairs:
                entries.append(entry(pair, ranks, pairs.index(pair), number + 2, 64, pair[0] == device, "completed"))
        for key, message, _ in self.launched[device]:
            state = "completed" if key in self.over else "scheduled"
            if state == "scheduled" and has_timing and (key, message.is_send) in self.begun:
                state = "started"
            pair, number = key
            own = entry(pair, ranks, pairs.index(pair), number + 2 + before, 4096, message.is_send, state)
            own["time_discovered_started_ns"] = 5 if has_timing and state != "scheduled" else None
            entries.append(own)
        entries[0 if is_extra_first else len(entries) : 0] = [dict(each) for each in extra]
        for order, each in enumerate(entries):
            each["record_id"] = order
        config = {each["process_group"][0]: {"name": "", "desc": "", "ranks": each.pop("ranks")} for each in entries}
        data = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries[-ring:]}
        path = folder / f"nccl_trace_rank_{ranks[device]}"
        path.write_bytes(json.dumps(data).encode() if as_json else pickle.dumps(data, 2))
        return path


def entry(
    pair: Pair, ranks: Sequence[int], group_id: int, number: int, nbytes: int, is_send: bool, state: str
) -> dict[str, Any]:
    """Return an entry of a message, as NCCL's backend has it recorded."""
    ends = f"{ranks[pair[0]]}-{ranks[pair[1]]}"
    return {
        "frames": [{"name": "send", "filename": "direct_links.py", "line": 51}], "record_id": 0, "pg_id": group_id + 1,
        "process_group": (f"pipecompile link {ends}", ""), "thread_name": "pt", "thread_id": "1", "collective_seq_id": 0,
        "p2p_seq_id": number, "op_id": number, "profiling_name": "nccl:send 0->1" if is_send else "nccl:recv 1<-0",
        "time_created_ns": 1, "input_sizes": [[nbytes]], "input_dtypes": ["Byte"], "output_sizes": [[nbytes]],
        "output_dtypes": ["Byte"], "state": state, "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": state == "completed", "timeout_ms": 600000, "is_p2p": True, "ranks": str([ranks[pair[0]], ranks[pair[1]]]),
    }  # fmt: skip


def collective(number: int, ranks: Sequence[int], state: str, name: str = "nccl:all_reduce") -> dict[str, Any]:
    """Return an entry of a collective of the group of copies."""
    own = entry((0, 0), (0,), 90, number, 4096, True, state)
    group = {"process_group": ("7", "dp"), "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False}
    return own | group | {"profiling_name": name, "ranks": str(list(ranks))}


def record(program: Program, steps: int, fault: Fault | None = None) -> Recording:
    """Return the ranks after `steps` steps, or as they stand after a fault."""
    recording = Recording(program, {device: [] for device in range(program.n_devices)})
    ranks = [_Rank(recording, device, steps, fault) for device in range(program.n_devices)]
    while sum(rank.advance() for rank in ranks):
        pass
    return recording


class _Rank:
    """One rank: the step and the index of its next launch, and the next compute instruction of its GPU."""

    def __init__(self, recording: Recording, device: int, steps: int, fault: Fault | None) -> None:
        self.recording, self.device, self.steps = recording, device, steps
        self.fault = fault if fault is not None and fault.device == device else None
        self.messages = messages_of(recording.program, device)
        self.counts = defaultdict[Pair, int](int)
        self.step = self.index = 0
        row = recording.program.rows[device]
        self.computes = [place for place, one in enumerate(row) if one.op is Op.COMPUTE]
        self.computed = 0  # compute instructions that are over, of all steps
        self.received = {message.value: message for message in self.messages if not message.is_send and message.value}

    def advance(self) -> bool:
        """Launch, compute and move what can; return whether anything did."""
        return sum((self._launch(), self._compute(), self._move())) > 0

    def _launch(self) -> bool:
        state, moved = self.recording, False
        while self.step < self.steps:
            if self.index == len(self.messages):
                if any(key not in state.over for key, _, _ in state.launched[self.device]):
                    break
                self.step, self.index = self.step + 1, 0
                continue
            if self.fault == Fault(Stop.HOST, self.device, self.step, self.index):
                break
            message = self.messages[self.index]
            key = message.pair, self.counts[message.pair]
            self.counts[message.pair] += 1
            state.launched[self.device].append((key, message, self.step))
            self.index, moved = self.index + 1, True
        return moved

    def _compute(self) -> bool:
        moved = False
        while self.computes and self.computed < len(self.computes) * self.steps:
            step, index = divmod(self.computed, len(self.computes))
            if step > self.step or self.fault == Fault(Stop.GPU, self.device, step, index):
                break
            instruction = self.recording.program.rows[self.device][self.computes[index]]
            needed = [self.received[o.value] for o in instruction.reads if o.value in self.received]
            keys = {(message.place, own): key for key, message, own in self.recording.launched[self.device]}
            if any(keys.get((message.place, step)) not in self.recording.over for message in needed):
                break
            self.computed, moved = self.computed + 1, True
        return moved

    def _move(self) -> bool:
        state, moved = self.recording, False
        for index, (key, message, step) in enumerate(state.launched[self.device]):
            pair, number = key
            if (key, message.is_send) in state.begun or (number and (pair, number - 1) not in state.over):
                continue
            if message.is_send and not self._has_value(message, step):
                continue
            state.begun.add((key, message.is_send))
            moved = True
            if self.fault == Fault(Stop.MESSAGE, self.device, step, index % len(self.messages)):
                state.lost.add(key)
        for key, is_send in [*state.begun]:
            if is_send and (key, False) in state.begun and key not in state.over and key not in state.lost:
                state.over.add(key)
                moved = True
        return moved

    def _has_value(self, message: OwnMessage, step: int) -> bool:
        before = sum(place < message.place for place in self.computes)
        row = self.recording.program.rows[self.device]
        for count, place in enumerate(self.computes, 1):
            if message.value is not None and any(o.value == message.value for o in row[place].writes):
                before = count
        return self.computed >= step * len(self.computes) + before


def record_gloo(rank: int, folder: str) -> None:
    """Write the dump of one of two processes with gloo, of which rank 0 launches three collectives and rank 1 two."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(8))
    dist.all_reduce(torch.ones(8))
    if rank == 0:
        dist.all_reduce(torch.ones(8), async_op=True)
    recorder, deadline = torch._C._distributed_c10d, time.monotonic() + 30
    while sum(entry["retired"] for entry in json.loads(recorder._dump_fr_trace_json())["entries"]) < 2:
        assert time.monotonic() < deadline, "a thread of gloo retires a collective after its wait has ended"
        time.sleep(0.001)
    Path(folder, f"dump_{rank}").write_bytes(recorder._dump_fr_trace())
    Path(folder, f"dump_{rank}.json").write_bytes(recorder._dump_fr_trace_json())
    store.set(f"written {rank}", "yes")
    store.wait(["written 0", "written 1"])
    os._exit(0)  # rank 0 has a collective that never ends
