"""Links between three ranks, which are threads, with gloo for NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipecompile.distributed.messages.direct_links import BACKENDS, DirectLink, Pair, close_links, open_links
from tests.distributed.rank_threads import ThreadMesh, run_ranks

pytestmark = pytest.mark.smoke

PAIRS = [(1, 2), (0, 1), (1, 0), (2, 0)]


def opened(rank: int, store: Store) -> dict[Pair, DirectLink]:
    own = [pair for pair in PAIRS if rank in pair]
    return open_links(own, ThreadMesh(rank, 3, store), store, lambda _, work: work.wait())  # type: ignore[arg-type]


def test_each_direction_has_an_order_of_its_own() -> None:
    """Ranks 0 and 1 both send first: on one communicator, NCCL would wait for ever."""

    def run(rank: int, store: Store) -> list[float]:
        links, received = opened(rank, store), []
        works: list[dist.Work] = []
        for source, target in PAIRS:
            if rank == source:
                works.append(links[source, target].send(torch.tensor([10.0 * source + target])))
        for source, target in sorted(PAIRS):
            if rank == target:
                part = torch.zeros(1)
                links[source, target].receive(part).wait()
                received.append(part.item())
        for work in works:
            work.wait()
        return received

    assert run_ranks(3, run) == [[10.0, 20.0], [1.0], [12.0]]


def test_links_that_are_aborted_end_a_wait() -> None:
    def run(rank: int, store: Store) -> str:
        links = opened(rank, store)
        if rank == 1:
            work = links[0, 1].receive(torch.zeros(1))
            with pytest.raises(RuntimeError) as caught:
                work.wait()
            return str(caught.value)
        if rank == 0:
            links[0, 1].abort()
        return ""

    assert run_ranks(3, run)[1]


def test_the_links_of_copies_of_a_pipeline_do_not_meet() -> None:
    """Copies share a store: links are named by ranks, not by pipeline devices."""

    class Other(ThreadMesh):
        def rank_of(self, index: int) -> int:
            return 20 + index

    def run(rank: int, store: Store) -> float:
        mesh = (ThreadMesh if rank < 2 else Other)(rank % 2, 2, store)
        link = open_links([(0, 1)], mesh, store, lambda _, work: work.wait())[0, 1]  # type: ignore[arg-type]
        part = torch.tensor([float(rank)])
        (link.receive if rank % 2 else link.send)(part).wait()
        return part.item()

    assert run_ranks(4, run) == [0.0, 0.0, 2.0, 2.0]


def test_links_have_names_in_the_flight_recorder() -> None:
    """The recorder notes the calls of NCCL under the name of the backend; it has no messages of gloo."""
    named: list[str] = []

    def noting(*given: Any) -> Any:
        named.append(given[-1])
        return BACKENDS["cpu"](*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipecompile.distributed.messages.direct_links.BACKENDS", {"cpu": noting})
        run_ranks(3, lambda rank, store: len(opened(rank, store)))
    assert sorted(named) == sorted(f"pipecompile link {10 + a}-{10 + b}" for a, b in PAIRS for _ in range(2))


def test_communicators_of_a_gpu_are_aborted_before_the_process_ends() -> None:
    """Before, torch ended them while it was torn down, and warned that `destroy_process_group` had not been called."""
    ended: list[str] = []

    class Backend:
        def abort(self) -> None:
            ended.append("aborted")

    close_links({(0, 1): DirectLink((0, 1), Backend(), 1), (1, 0): DirectLink((1, 0), Backend(), 0)})
    assert ended == ["aborted"] * 2


def test_links_over_gloo_are_left_to_their_end() -> None:
    def run(rank: int, store: Store) -> None:
        links = opened(rank, store)
        close_links(links)
        if rank == 0:
            links[0, 1].send(torch.ones(1)).wait()
        if rank == 1:
            links[0, 1].receive(torch.zeros(1)).wait()

    run_ranks(3, run)
