"""Links from device to device: one communicator per pair of ranks and direction.

    rank 0 ══ 0-1 ══► rank 1        communicator 0-1 has the messages from rank 0 to rank 1, in the order of the program,
    rank 0 ◄══ 1-0 ══ rank 1        and no others: messages that go the other way are never queued behind them

NCCL matches a send with a receive by their order on the communicator alone; there are no tags. Each communicator is a backend of
its own, outside of all process groups, and its ranks meet in the store of the pipeline: names of groups depend on how many groups
a process has created, which differs between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.torch_private.process_groups import gloo_backend, nccl_backend

__all__ = ["BACKENDS", "LINK_NAME", "DirectLink", "Pair", "close_links", "open_links"]

Pair = tuple[int, int]
"""The sending and the receiving pipeline device of a link."""

Backends = Callable[[Store, int, int, timedelta, str], Any]


def _gloo_link(store: Store, place: int, size: int, timeout: timedelta, _: str) -> Any:
    """Return a backend that stands in for NCCL in the tests. The flight recorder has no messages of gloo, so it needs no name."""
    return gloo_backend(store, place, size, timeout)


BACKENDS: Mapping[str, Backends] = MappingProxyType({"cuda": nccl_backend, "cpu": _gloo_link})
"""The backend of a link, by the type of the device."""

LINK_NAME = "pipecompile link {}"
"""Name of a link in the flight recorder, by the sending and the receiving rank: 0-1."""

_TIMEOUT = timedelta(days=30)
"""Timeout of a message in c10d: the thread that checks the status board ends a wait long before."""


@dataclass(frozen=True, slots=True)
class DirectLink:
    """The end on this rank of the communicator of `pair`. `peer` is the number of the other rank in the backend."""

    pair: Pair
    backend: Any
    peer: int

    def send(self, part: torch.Tensor) -> dist.Work:
        """Launch a send on the current stream."""
        work: dist.Work = self.backend.send([part], self.peer, 0)
        return work

    def receive(self, part: torch.Tensor) -> dist.Work:
        """Launch a receive on the current stream."""
        work: dist.Work = self.backend.recv([part], self.peer, 0)
        return work

    def abort(self) -> None:
        """End all messages that are under way on the communicator, on this rank."""
        with suppress(RuntimeError):
            if not isinstance(self.backend, dist.ProcessGroupGloo):
                self.backend.abort()
                return
            part = torch.empty(
                1, dtype=torch.uint8, device="cpu"
            )  # gloo closes its connections when a receive times out
            self.backend.recv([part], self.peer, 1).wait(timedelta(milliseconds=1))  # type: ignore[attr-defined]


def close_links(links: Mapping[Pair, DirectLink]) -> None:
    """Abort the communicators of links of which no message is under way, before the process ends: else torch does so when CUDA may be gone,
    with a warning of `destroy_process_group`, which does not know them. Gloo needs none of this.
    """
    for link in links.values():
        if not isinstance(link.backend, dist.ProcessGroupGloo):
            link.abort()


def open_links(
    pairs: Iterable[Pair], ranks: RankMesh, store: Store, wait: Callable[[int, dist.Work], None]
) -> dict[Pair, DirectLink]:
    """Open the links of this rank, which all of `pairs` have as an end. The ranks at both ends must call this together.

    Links open one after the other in one order on all ranks, so that no ranks wait for one another in a circle; one byte goes
    over each, because NCCL sets up a communicator at its first message. `wait` waits for a message to or from a device.
    """
    links, device = {}, ranks.devices[ranks.index]
    for pair in sorted(pairs):
        place = pair.index(ranks.index)
        ends = "-".join(str(ranks.rank_of(index)) for index in pair)
        meeting = PrefixStore(f"link {ends}", store)
        backend = BACKENDS[device.type](meeting, place, 2, _TIMEOUT, LINK_NAME.format(ends))
        link = links[pair] = DirectLink(pair, backend, 1 - place)
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        wait(pair[1 - place], link.receive(byte) if place else link.send(byte))
    return links
