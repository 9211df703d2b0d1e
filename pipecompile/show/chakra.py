"""Programs as execution traces of MLCommons Chakra, for simulators and replay tools that read its protobuf schema.

    COMPUTE   COMP_NODE; OFFLOAD is MEM_STORE_NODE, RELOAD is MEM_LOAD_NODE; UNSHARD and REDUCE_GRAD are COMM_COLL_NODE
    SEND      COMM_SEND_NODE; to the host MEM_STORE_NODE
    RECV      COMM_RECV_NODE; from the host MEM_LOAD_NODE
    tie       COMM_COLL_NODE, as BROADCAST or REDUCE of `comm_type`
    FREE      METADATA_NODE

A file per device: the metadata, then a node per instruction, each after its length. The id of a node is the index of its
instruction in the row. Data dependencies lead to the instructions that wrote what a node reads. Control dependencies have the
rest of the order: computations of a device one after the other, messages of a link one after the other, a FREE after all
readers, and a write into a buffer after the FREE of what was in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from pipecompile.errors import InputError
from pipecompile.ir import HOST, Instruction, Kind, Op, Program
from pipecompile.ir.timeline import COMPUTE, Timeline
from pipecompile.show.protobuf import delimited, message, number, packed, text
from pipecompile.text.input_checks import file_path
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["NodeType", "TraceNode", "chakra_traces", "save_chakra", "trace_nodes"]

SCHEMA = "0.0.4"
"""Version of the schema of Chakra."""

_MICROSECONDS = 1e6


class NodeType(IntEnum):
    """Types of nodes, with the numbers of the schema."""

    METADATA_NODE = 1
    MEM_LOAD_NODE = 2
    MEM_STORE_NODE = 3
    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6
    COMM_COLL_NODE = 7


_COLLECTIVES = {Op.REDUCE: 1, Op.BROADCAST: 5}
"""Numbers of `CollectiveCommType` in the schema."""

_MOVES = {
    Kind.OFFLOAD: NodeType.MEM_STORE_NODE, Kind.RELOAD: NodeType.MEM_LOAD_NODE, Kind.UNSHARD: NodeType.COMM_COLL_NODE,
    Kind.RESHARD: NodeType.METADATA_NODE, Kind.REDUCE_GRAD: NodeType.COMM_COLL_NODE,
}  # fmt: skip

_VALUES = {"int32": 7, "int64": 9, "uint64": 13, "bool": 27}
"""Numbers of the fields of an attribute that hold a value of this type."""


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One instruction. `start` and `duration` are seconds; `attributes` are (name, type, value), where types are those of protobuf."""

    id: int
    name: str
    type: NodeType
    data: tuple[int, ...] = ()
    control: tuple[int, ...] = ()
    start: float = 0.0
    duration: float = 0.0
    attributes: tuple[tuple[str, str, int], ...] = ()

    def encoded(self) -> bytes:
        """Return the node as a protobuf message of the schema."""
        times = number(6, round(self.start * _MICROSECONDS)) + number(7, round(self.duration * _MICROSECONDS))
        attributes = (text(1, name) + number(_VALUES[kind], value) for name, kind, value in self.attributes)
        parts = (
            number(1, self.id),
            text(2, self.name),
            number(3, self.type),
            packed(4, self.control),
            packed(5, self.data),
        )
        return b"".join((*parts, times, *(message(10, one) for one in attributes)))


@dataclass(slots=True)
class _Row:
    """State of the walk along the row of one device: the latest writers, readers and frees, by index in the row."""

    writers: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)
    freed: dict[tuple[str, int | None, int], int] = field(default_factory=dict)
    latest: dict[object, int] = field(default_factory=dict)

    def dependencies(self, index: int, instruction: Instruction) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (data, control) dependencies of an instruction, and note what it reads and writes."""
        data = {self.writers[str(one.value)] for one in instruction.reads if str(one.value) in self.writers}
        control = set()
        for one in instruction.writes:
            if one.slot is not None:
                control |= {self.freed.get((one.value.name, one.value.consumer, one.slot), index)}
        if instruction.op is Op.FREE:
            for one in instruction.reads:
                control |= set(self.readers.pop(str(one.value), ()))
                if one.slot is not None:
                    self.freed[one.value.name, one.value.consumer, one.slot] = index
        else:
            line = (instruction.op, instruction.peer) if instruction.peer is not None else None
            control |= {self.latest.get(line, index)}
            self.latest[line] = index
            for one in instruction.reads:
                self.readers.setdefault(str(one.value), []).append(index)
        self.writers |= {str(one.value): index for one in instruction.writes}
        return tuple(sorted(data)), tuple(sorted(control - data - {index}))


def trace_nodes(program: Program, timeline: Timeline | None = None) -> Iterator[list[TraceNode]]:
    """Yield the nodes of each device. With a timeline they have its times, in seconds."""
    tags: dict[str, int] = {}
    sizes = {route.value: round(route.nbytes) for route in program.routes}
    sizes |= {tie.name: round(tie.nbytes) for tie in program.ties}
    spans = _spans(timeline)
    for device, row in enumerate(program.rows):
        state, nodes = _Row(), []
        for index, instruction in enumerate(row):
            data, control = state.dependencies(index, instruction)
            name = str(instruction.action or instruction)
            label = _sent(instruction) if instruction.action is None else name
            start, end = spans.get((device, label), (0.0, 0.0))
            attributes = _attributes(device, instruction, sizes, tags)
            nodes.append(TraceNode(index, name, _type(instruction), data, control, start, end - start, attributes))
        yield nodes


def chakra_traces(program: Program, timeline: Timeline | None = None) -> list[bytes]:
    """Return the content of a file per device."""
    head = delimited(text(1, SCHEMA))
    return [head + b"".join(delimited(node.encoded()) for node in nodes) for nodes in trace_nodes(program, timeline)]


def save_chakra(program: Program, path: str | Path, timeline: Timeline | None = None) -> list[Path]:
    """Write `PATH.0.et`, `PATH.1.et` and so on, an execution trace of MLCommons Chakra per device, and return their paths.

    With `timeline`, as `pipe.simulate()` returns it, nodes have its times in whole microseconds. Raise InputError if a
    file cannot be written.
    """
    _check(program, timeline)
    target = file_path("path", path)
    if not target.name:
        raise InputError(f"path={str(path)!r} has no name for files", hint='path="out/step"')
    paths = [target.with_name(f"{target.name}.{device}.et") for device in range(program.n_devices)]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for file, content in zip(paths, chakra_traces(program, timeline), strict=True):
            file.write_bytes(content)
    except OSError as error:
        raise InputError(f"path={str(path)!r} cannot be written: {error.strerror}", hint='path="out/step"') from error
    return paths


def _check(program: object, timeline: object) -> None:
    if not isinstance(program, Program):
        raise InputError(f"program={shown(program)} is not a Program", hint='pc.save_chakra(pipe.program, "out/step")')
    if timeline is None or (isinstance(timeline, Timeline) and timeline.n_devices == program.n_devices):
        return
    raise InputError(
        f"timeline={shown(timeline)} is not a timeline of {counted(program.n_devices, 'device')}",
        hint="timeline=pipe.simulate() or timeline=pipe.measured, of the pipeline whose program is written",
    )


def _spans(timeline: Timeline | None) -> dict[tuple[int, str], tuple[float, float]]:
    """Return (start, end) in seconds after the first start, by device and action, or by sender, values and receiver."""
    if timeline is None or not timeline.spans:
        return {}
    origin = min(span.start for span in timeline.spans)
    named = {}
    for span in timeline.spans:
        label = span.name if span.track == COMPUTE else f"{span.track} {span.name}"
        named[span.device, label] = (span.start - origin, span.end - origin)
    return named


def _sent(instruction: Instruction) -> str:
    """Return the label of a transfer in a timeline."""
    if instruction.op is not Op.SEND:
        return ""
    receiver = "host" if instruction.peer == HOST else str(instruction.peer)
    return f"to {receiver} {instruction.reads[0].value}"


def _type(instruction: Instruction) -> NodeType:
    is_host = instruction.peer == HOST
    match instruction.op:
        case Op.COMPUTE:
            assert instruction.action is not None
            return _MOVES.get(instruction.action.kind, NodeType.COMP_NODE)
        case Op.SEND:
            return NodeType.MEM_STORE_NODE if is_host else NodeType.COMM_SEND_NODE
        case Op.RECV:
            return NodeType.MEM_LOAD_NODE if is_host else NodeType.COMM_RECV_NODE
        case Op.FREE:
            return NodeType.METADATA_NODE
        case Op.BROADCAST | Op.REDUCE:
            return NodeType.COMM_COLL_NODE


def _attributes(
    device: int, instruction: Instruction, sizes: Mapping[str, int], tags: dict[str, int]
) -> tuple[tuple[str, str, int], ...]:
    """Return the attributes of a node. Both ends of a message have the same tag: its value's number."""
    own = (("is_cpu_op", "bool", 0),)
    if instruction.tie is not None:
        size = sizes.get(instruction.tie, 0)
        return (*own, ("comm_type", "int64", _COLLECTIVES[instruction.op]), ("comm_size", "int64", size))
    if instruction.peer is None:
        return own
    value = (*instruction.reads, *instruction.writes)[0].value
    size = sizes.get(value.name, 0)
    if instruction.peer == HOST:
        return (*own, ("tensor_size", "uint64", size))
    ends = (device, instruction.peer) if instruction.op is Op.SEND else (instruction.peer, device)
    tag = tags.setdefault(f"{value} {ends}", len(tags))
    names = ("comm_src", "int32", ends[0]), ("comm_dst", "int32", ends[1]), ("comm_tag", "int32", tag)
    return (*own, ("comm_size", "int64", size), *names)
