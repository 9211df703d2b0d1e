"""sail-sg's zero-bubble schedules: the text of their lists of nodes, as Python prints them, one list per rank.

    [[ScheduledNode(type=F, stage=0, microbatch=0, chunk=0, layer_group_idx=0), ...], [...]]

`stage` is the rank, `chunk` numbers its stages, `layer_group_idx` is the stage of the model. Without it, the chunks of a rank are
placed in a V or in a loop, whichever can run. B is the gradient of inputs where a W follows, else the whole backward, as BW is.
Fields for times and communication peers are skipped, and so are POST_VALIDATION nodes: these check the optimizer's step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipecompile.errors import PipecompileError, ScheduleError
from pipecompile.interchange.pipeline_order import OrderCell, PipelineOrder
from pipecompile.verifiers import verify

__all__ = ["node_lists", "parse_nodes"]

_NODE = re.compile(r"ScheduledNode\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_FIELD = re.compile(r"(\w+)=(<[^>]*>|'[^']*'|\"[^\"]*\"|[^,\s]+)")
_TRANSFERS = {
    "SEND_FORWARD": "SEND_F", "RECV_FORWARD": "RECV_F", "SEND_BACKWARD": "SEND_B", "RECV_BACKWARD": "RECV_B",
}  # fmt: skip
_COMPUTES = ("F", "B", "W", "BW")
_WORDS = {short: long for long, short in _TRANSFERS.items()}

Node = tuple[str, int, int, int, int | None]
"""Type, rank, chunk, micro-batch, and stage of the model if it is written."""


def parse_nodes(text: str, name: str = "zero-bubble") -> PipelineOrder:
    """Return the order of a text of nodes. Raise ScheduleError with the node that cannot be read."""
    nodes = [node for node in map(_node, _NODE.findall(text)) if node is not None]
    if not nodes:
        raise ScheduleError("there is not a ScheduledNode(type=F, ...) in the text")
    faults: list[str] = []
    for stage_of in _stage_maps(nodes):
        order = _order(nodes, stage_of, name)
        try:
            verify(order.schedule)
        except PipecompileError as error:
            faults.append(error.what)
            continue
        return order
    stage_of = next(_stage_maps(nodes))
    return _order(nodes, stage_of, name)


def _node(fields_text: str) -> Node | None:
    """Return a node; None for nodes that are not part of a step's order."""
    fields = {key: value.strip("'\"") for key, value in _FIELD.findall(fields_text)}
    kind = fields.get("type", "").removeprefix("<FuncType.").partition(":")[0].removeprefix("FuncType.")
    where = f"ScheduledNode({fields_text})"
    if "POST_VALIDATION" in kind:
        return None
    if kind not in _COMPUTES and kind not in _TRANSFERS:
        raise ScheduleError(f"type={kind!r} of a node is not known", where=where, why=f"known are {', '.join((*_COMPUTES, *_TRANSFERS))}")  # fmt: skip
    if fields.get("seq_split_idx", "0") != "0":
        raise ScheduleError("a micro-batch is split along its sequence", where=where, why="a cell is a whole micro-batch here")  # fmt: skip
    numbers = [fields.get("stage"), fields.get("chunk", "0"), fields.get("microbatch", fields.get("minibatch"))]
    group = fields.get("layer_group_idx", "None")
    if not all(number is not None and number.isdecimal() for number in numbers):
        raise ScheduleError("stage, chunk and microbatch of a node are whole numbers", where=where)
    rank, chunk, microbatch = (int(number or 0) for number in numbers)
    return kind, rank, chunk, microbatch, int(group) if group.isdecimal() else None


def _stage_maps(nodes: Sequence[Node]) -> Iterator[dict[tuple[int, int], int]]:
    """Yield, for each placement that the nodes may mean, the stage of every rank and chunk."""
    places = {(rank, chunk) for _, rank, chunk, _, _ in nodes}
    written = {(rank, chunk): stage for kind, rank, chunk, _, stage in nodes if stage is not None and kind in _COMPUTES}
    if written.keys() >= places:
        yield written
        return
    n_ranks = 1 + max(rank for rank, _ in places)
    yield {(r, c): c * n_ranks + (n_ranks - 1 - r if c % 2 else r) for r, c in places}
    yield {(r, c): c * n_ranks + r for r, c in places}


def _order(nodes: Sequence[Node], stage_of: dict[tuple[int, int], int], name: str) -> PipelineOrder:
    last = max(stage_of.values())
    rank_of = {stage: rank for (rank, _), stage in stage_of.items()}
    divided = {(stage_of[rank, chunk], m) for kind, rank, chunk, m, _ in nodes if kind == "W"}
    rows: list[list[OrderCell]] = [[] for _ in range(1 + max(rank_of.values()))]
    for kind, rank, chunk, microbatch, _ in nodes:
        stage = stage_of[rank, chunk]
        op = _TRANSFERS.get(kind, kind)
        if kind in ("B", "BW"):
            op = "I" if kind == "B" and (stage, microbatch) in divided else "B"
        cell = OrderCell(stage, op, microbatch)
        peer = cell.partner.stage if cell.is_transfer else stage
        if not cell.is_transfer or (0 <= peer <= last and rank_of.get(peer) != rank):
            rows[rank].append(cell)
    return PipelineOrder(tuple(map(tuple, rows)), name, "sail-sg")


def node_lists(order: PipelineOrder) -> str:
    """Return the order as lists of nodes, which `parse_nodes` reads. Cells without a node, such as UNSHARD, raise ScheduleError."""
    placement = order.schedule.placement
    chunks = [sorted(stage for stage, rank in enumerate(placement) if rank == own) for own in range(order.n_ranks)]
    return "[" + ",\n ".join(f"[{', '.join(_texts(order, rank, chunks[rank]))}]" for rank in range(order.n_ranks)) + "]"


def _texts(order: PipelineOrder, rank: int, stages: Sequence[int]) -> Iterator[str]:
    for cell in order.rows[rank]:
        for part in cell.parts or (cell,):
            kind = {"I": "B", "B": "BW", "F": "F", "W": "W"}.get(part.op) or _WORDS.get(part.op)
            if kind is not None:
                chunk = stages.index(part.stage)
                yield (
                    f"ScheduledNode(type={kind}, stage={rank}, microbatch={part.microbatch}, chunk={chunk}, "
                    f"layer_group_idx={part.stage})"
                )
            elif part.op and not part.op.startswith("WAIT_SEND"):
                raise ScheduleError(f"{part} has no node in this form", where=f"rank {rank}")
