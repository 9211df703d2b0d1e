"""Execution traces of Chakra decode with its schema, and have the nodes and the dependencies of the program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.ir import HOST, Op, Program, Route
from pipecompile.ir.routes import Tie
from pipecompile.passes import lower
from pipecompile.show.chakra import NodeType

FIELDS = {
    "GlobalMetadata": [("version", 1, "STRING", False), ("attr", 2, "AttributeProto", True)],
    "AttributeProto": [
        ("name", 1, "STRING", False), ("int32_val", 7, "INT32", False), ("int64_val", 9, "INT64", False),
        ("uint64_val", 13, "UINT64", False), ("bool_val", 27, "BOOL", False),
    ],
    "Node": [
        ("id", 1, "UINT64", False), ("name", 2, "STRING", False), ("type", 3, "UINT32", False), ("ctrl_deps", 4, "UINT64", True),
        ("data_deps", 5, "UINT64", True), ("start_time_micros", 6, "UINT64", False), ("duration_micros", 7, "UINT64", False),
        ("attr", 10, "AttributeProto", True),
    ],
}  # fmt: skip
"""Fields of the schema: (name, number, type or message, whether it is repeated)."""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """Return the messages of the schema as classes of Google's library."""
    protobuf = pytest.importorskip("google.protobuf.descriptor_pb2", reason="needs protobuf")
    from google.protobuf import descriptor_pool, message_factory

    file = protobuf.FileDescriptorProto(name="et.proto", package="ChakraProtoMsg", syntax="proto3")
    kinds = protobuf.FieldDescriptorProto
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            one = message.field.add(name=field, number=number, label=3 if repeated else 1)
            if kind in FIELDS:
                one.type, one.type_name = kinds.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                one.type = getattr(kinds, f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in FIELDS
    }


def decoded(path: Path, schema: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return the version and the nodes of a file, whose messages each follow their length."""
    from google.protobuf.internal.decoder import _DecodeVarint32

    content, position, messages = path.read_bytes(), 0, []
    while position < len(content):
        size, position = _DecodeVarint32(content, position)
        messages.append(
            (schema["Node"] if messages else schema["GlobalMetadata"]).FromString(content[position : position + size])
        )
        position += size
    return messages[0].version, messages[1:]


def attributes(node: Any) -> dict[str, int]:
    return {one.name: one.int32_val or one.int64_val or one.uint64_val or int(one.bool_val) for one in node.attr}


@dataclass
class Buffers:
    """A machine with memory: runs a row of a program in any order, and says whether each read finds its own value."""

    held: dict[object, str]

    def run(self, instruction: Any) -> None:
        for one in instruction.reads:
            assert (
                self.held.pop(key(one)) == str(one.value)
                if instruction.op is Op.FREE
                else self.held[key(one)] == str(one.value)
            )
        for one in instruction.writes:
            assert one.slot is None or key(one) not in self.held
            self.held[key(one)] = str(one.value)


def key(operand: Any) -> object:
    return (
        operand.value.name,
        operand.value.consumer,
        operand.slot,
        None if operand.slot is not None else operand.value.microbatch,
    )


def latest_first(nodes: list[Any]) -> list[int]:
    """Return the order that runs what is ready with the largest id, the opposite of the row, by dependencies alone."""
    left, order = {node.id: {*node.data_deps, *node.ctrl_deps} for node in nodes}, []
    while left:
        one = max(number for number, needs in left.items() if needs.isdisjoint(left))
        del left[one]
        order.append(one)
    return order


def program() -> Program:
    routes = (
        Route("x", HOST, (0,), 64.0, gradient=False), Route("a", 0, (1, 2), 128.0), Route("b", 1, (2,), 256.0),
        Route("c", 2, (3,), 32.0), Route("y", 3, (HOST,), 16.0, gradient=False),
    )  # fmt: skip
    return lower(pc.build_schedule("zb-h1", 4, 6), routes, ties=[Tie("w", (0, 3), 4096.0)])


def test_a_trace_decodes_with_the_schema_and_has_the_nodes_of_the_program(
    tmp_path: Path, schema: dict[str, Any]
) -> None:
    written = program()
    paths = pc.save_chakra(written, tmp_path / "out" / "step", pc.simulate(written, forward=2e-3, input_grad=1e-3))
    assert [path.name for path in paths] == [f"step.{device}.et" for device in range(4)]
    types = {Op.COMPUTE: NodeType.COMP_NODE, Op.FREE: NodeType.METADATA_NODE, Op.BROADCAST: NodeType.COMM_COLL_NODE, Op.REDUCE: NodeType.COMM_COLL_NODE}  # fmt: skip
    sent, received = {}, {}
    for path, row in zip(paths, written.rows, strict=True):
        version, nodes = decoded(path, schema)
        assert version == "0.0.4"
        assert [node.id for node in nodes] == list(range(len(row)))
        for node, instruction in zip(nodes, row, strict=True):
            facts, is_host = attributes(node), instruction.peer == HOST
            assert node.name == str(instruction.action or instruction)
            if instruction.op in types:
                assert node.type == types[instruction.op]
            else:
                is_send = instruction.op is Op.SEND
                assert node.type == (3 - (not is_send) if is_host else 5 + (not is_send))
                assert facts["tensor_size" if is_host else "comm_size"] in (16, 32, 64, 128, 256)
                if not is_host:
                    ends = facts["comm_src"], facts["comm_dst"], facts["comm_tag"]
                    (sent if is_send else received)[ends] = facts["comm_size"]
            if node.name.endswith("F0"):
                assert node.duration_micros == 2000
            assert facts.get("comm_size") == 4096 or instruction.tie is None
    assert sent == received
    assert len(sent) == 6 * 2 * 4


def test_any_order_that_keeps_the_dependencies_reads_what_the_program_reads(
    tmp_path: Path, schema: dict[str, Any]
) -> None:
    """The order of latest first runs every row: a value is read after it is written, before it is freed, in a buffer of its own."""
    written = program()
    n_moved = 0
    for path, row in zip(pc.save_chakra(written, tmp_path / "step"), written.rows, strict=True):
        _, nodes = decoded(path, schema)
        writers = {str(one.value): index for index, instruction in enumerate(row) for one in instruction.writes}
        for node, instruction in zip(nodes, row, strict=True):
            assert set(node.data_deps) == {writers[str(one.value)] for one in instruction.reads}
        order, machine = latest_first(nodes), Buffers({})
        for index in order:
            machine.run(row[index])
        computed = [str(row[index].action) for index in order if row[index].op is Op.COMPUTE]
        assert computed == [str(instruction.action) for instruction in row if instruction.op is Op.COMPUTE]
        n_moved += order != sorted(order)
    assert n_moved == 4


def test_what_is_no_program_or_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pc.InputError, match="is not a Program"):
        pc.save_chakra(pc.build_schedule("1f1b", 2, 2), tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(pc.InputError, match="not a timeline of 4 devices"):
        pc.save_chakra(program(), tmp_path / "x", pc.simulate(pc.build_schedule("1f1b", 2, 2)))
    (tmp_path / "file").write_text("")
    with pytest.raises(pc.InputError, match="cannot be written"):
        pc.save_chakra(program(), tmp_path / "file" / "x")
