"""Verifier of the communication in an order: messages, waits for sends, and the sharding of stages.

1. Each value that a stage on another rank reads has one SEND after its computation, and one RECV before its reader.
2. Between two ranks, one after the other, messages are received in the order in which they are sent: NCCL has no tags.
3. A WAIT_SEND comes after its SEND, once; if there is any, each SEND has one.
4. A stage that is unsharded in the file computes between UNSHARD and RESHARD, and has one reduction pending at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pipecompile.interchange.launch_graph import received_by
from pipecompile.interchange.pipeline_order import OrderCell, PipelineOrder

__all__ = ["at", "message_faults"]


def at(rank: int, index: int, cell: OrderCell) -> str:
    """Return the place of a cell as editors count: lines and cells from 1."""
    return f"rank {rank} (line {rank + 1}), cell {index + 1} {cell}"


def message_faults(order: PipelineOrder) -> list[str]:
    """Return all faults of the communication of an order whose computations are legal. Linear."""
    placement = order.schedule.placement
    faults = [*_repeated(order), *_sharding_faults(order), *_reduction_faults(order), *_wait_faults(order)]
    if order.has_communication:
        faults += _transfer_faults(order, placement)
        faults += _value_faults(order, placement)
    return faults or list(_swaps(order, placement))


def _repeated(order: PipelineOrder) -> Iterator[str]:
    counts = Counter(cell for _, _, cell in order.cells() if cell.is_transfer)
    yield from (f"{cell} is there {count} times, once is right" for cell, count in counts.items() if count > 1)


def _transfer_faults(order: PipelineOrder, placement: Sequence[int]) -> Iterator[str]:
    """Yield sends and receives that no stage needs, on a wrong rank, or without a partner."""
    present = {(rank, cell) for rank, _, cell in order.cells() if cell.is_transfer}
    last = len(placement) - 1
    for rank, index, cell in order.cells():
        if not cell.is_transfer:
            continue
        partner = cell.partner
        if not (0 <= partner.stage <= last and 0 <= cell.stage <= last):
            yield f"{at(rank, index, cell)}: stages are 0 to {last}, and nothing comes before the first or after the last"
        elif placement[cell.stage] != rank:
            yield f"{at(rank, index, cell)}: stage {cell.stage} is on rank {placement[cell.stage]}"
        elif placement[partner.stage] == rank:
            yield f"{at(rank, index, cell)}: stages {cell.stage} and {partner.stage} are both on this rank"
        elif (placement[partner.stage], partner) not in present:
            other = placement[partner.stage]
            yield f"{at(rank, index, cell)} waits for {partner}, which is not in rank {other} (line {other + 1})"


def _value_faults(order: PipelineOrder, placement: Sequence[int]) -> Iterator[str]:
    """Yield computations before the receipt of what they read, and sends before the computation of what they send."""
    for rank, row in enumerate(order.rows):
        done: set[object] = set()
        for index, cell in enumerate(row):
            for need in received_by(cell):
                source = need.partner.stage
                if 0 <= source < len(placement) and placement[source] != rank and need not in done:
                    yield f"{at(rank, index, cell)} needs {need}, which does not come before it in the row"
            if cell.is_send and not done & _producers(cell):
                yield f"{at(rank, index, cell)} sends what the row has not computed before it"
            done |= {cell, *((a.stage, a.kind.value, a.microbatch) for a in cell.actions)}


def _producers(send: OrderCell) -> set[object]:
    kinds = "F" if send.op == "SEND_F" else "BI"
    return {(send.stage, kind, send.microbatch) for kind in kinds}


def _swaps(order: PipelineOrder, placement: Sequence[int]) -> Iterator[str]:
    """Yield the first message of each pair of ranks that is not received in its turn."""
    sent: dict[tuple[int, int], list[OrderCell]] = {}
    received: dict[tuple[int, int], list[OrderCell]] = {}
    for rank, _, cell in order.cells():
        if cell.is_transfer:
            peer = placement[cell.partner.stage]
            (sent if cell.is_send else received).setdefault((rank, peer) if cell.is_send else (peer, rank), []).append(
                cell
            )
    for (source, target), sends in sent.items():
        for number, (send, receive) in enumerate(zip(sends, received.get((source, target), ()), strict=False)):
            if send.partner != receive:
                yield (
                    f"message {number + 1} from rank {source} (line {source + 1}) to rank {target} (line {target + 1}) is sent by"
                    f" {send} and received by {receive}: without tags, as on NCCL, values are swapped"
                )
                break


def _wait_faults(order: PipelineOrder) -> Iterator[str]:
    has_waits = any(cell.op.startswith("WAIT_SEND") for _, _, cell in order.cells())
    for rank, row in enumerate(order.rows):
        pending: dict[OrderCell, int] = {}
        for index, cell in enumerate(row):
            if cell.is_send:
                pending[cell] = index
            elif cell.op.startswith("WAIT_SEND"):
                sent = OrderCell(cell.stage, cell.op.removeprefix("WAIT_"), cell.microbatch)
                if pending.pop(sent, None) is None:
                    yield f"{at(rank, index, cell)} waits for no send before it"
        if has_waits:
            for cell, index in pending.items():
                yield f"{at(rank, index, cell)} is not waited for, other sends are: torch refuses the file"


def _sharding_faults(order: PipelineOrder) -> Iterator[str]:
    sharded = {cell.stage for _, _, cell in order.cells() if cell.op == "UNSHARD"}
    for rank, row in enumerate(order.rows):
        unsharded: set[int] = set()
        for index, cell in enumerate(row):
            if cell.op == "UNSHARD":
                if cell.stage in unsharded:
                    yield f"{at(rank, index, cell)}: the stage is unsharded already"
                unsharded.add(cell.stage)
            elif cell.op == "RESHARD" and cell.stage in sharded:
                if cell.stage not in unsharded:
                    yield f"{at(rank, index, cell)}: the stage is not unsharded"
                unsharded.discard(cell.stage)
            for stage in sorted({action.stage for action in cell.actions} & sharded - unsharded):
                yield f"{at(rank, index, cell)} computes while stage {stage} is sharded"


def _reduction_faults(order: PipelineOrder) -> Iterator[str]:
    """Yield reductions that begin while another is pending, and those without a wait, if any reduction of the file has one."""
    if not any(cell.op == "WAIT_REDUCE_GRAD" for _, _, cell in order.cells()):
        return
    for rank, row in enumerate(order.rows):
        pending: int | None = None
        for index, cell in enumerate(row):
            if cell.op == "REDUCE_GRAD":
                if pending is not None:
                    yield f"{at(rank, index, cell)}: the reduction of stage {pending} is pending, torch allows one at a time"
                pending = cell.stage
            elif cell.op == "WAIT_REDUCE_GRAD":
                if pending != cell.stage:
                    yield f"{at(rank, index, cell)}: no reduction of this stage is pending"
                pending = None
        if pending is not None:
            yield f"rank {rank} (line {rank + 1}): {pending}REDUCE_GRAD has no WAIT_REDUCE_GRAD"
