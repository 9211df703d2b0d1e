"""The backends of two ranks, which are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.distributed.failures.failure_report import Disagreement
from pipecompile.distributed.messages.direct_values import DirectValues
from pipecompile.distributed.messages.value_transport import GlooValues
from pipecompile.distributed.rank_backend import RankBackend, owner_of, values_of
from pipecompile.parameters.placement import Homes
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.planning.planner import Planned
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorms
from tests.distributed.rank_threads import run_communicators

SAMPLES = torch.randn(4, 3)


def on_ranks(function: Callable[[RankBackend], Any]) -> list[Any]:
    return run_communicators(2, lambda communicator: function(RankBackend(communicator)))


def layers(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)])


def test_the_first_rank_plans() -> None:
    assert on_ranks(lambda backend: backend.is_planner) == [True, False]


@pytest.mark.parametrize("samples", [None, 2])
def test_the_plan_goes_from_the_planner_to_all_ranks_without_its_problem(samples: int | None) -> None:
    plan = pc.compile(
        layers(2), 2, devices=["cpu"] * 2, example_args=(SAMPLES,), n_microbatches=2, cost="analytic"
    ).plan
    problem: Any = "a problem"
    planned = Planned(plan, problem, samples)
    first, second = on_ranks(lambda backend: backend.share_plan(planned if backend.is_planner else None))
    assert first is planned
    assert (second.plan, second.problem, second.samples) == (plan, None, samples)


def test_ranks_that_recorded_the_same_graph_agree() -> None:
    graph = pc.trace(layers(2), SAMPLES)
    assert on_ranks(lambda backend: backend.agree_on_graph(graph, 2, (2, 4))) == [None, None]


@pytest.mark.parametrize("what", ["graph", "n_stages", "counts"])
def test_ranks_that_are_to_cut_differently_disagree(what: str) -> None:
    graphs = pc.trace(layers(2), SAMPLES), pc.trace(layers(3), SAMPLES)

    def error_of(backend: RankBackend) -> str:
        differs = int(not backend.is_planner)
        arguments = {"graph": graphs[differs * (what == "graph")], "n_stages": 2 + differs * (what == "n_stages"),
                     "counts": (2, 4 + differs * (what == "counts"))}  # fmt: skip
        with pytest.raises(Disagreement) as caught:
            backend.agree_on_graph(**arguments)
        return str(caught.value)

    first, second = on_ranks(error_of)
    assert first == second
    assert "the ranks disagree about the graph of the model" in first
    assert ("rank 10: no 2; rank 11: 2: Linear" if what == "graph" else "2 or 4 micro-batches") in first


def test_without_replicas_norms_are_those_of_the_rank_and_nothing_is_sharded() -> None:
    (backend, _), norms = on_ranks(lambda backend: backend), DeferredNorms()
    assert backend.deferred_norms(norms) is norms
    assert backend.replicas.group is None
    assert backend.shards.is_known


def test_a_rank_executable_needs_the_copies_of_ranks() -> None:
    backend, _ = on_ranks(lambda backend: backend)
    with pytest.raises(AssertionError):
        backend.executable(Mirrors())


def test_a_tensor_lives_on_its_home_and_an_unused_tensor_on_the_first_device() -> None:
    homes, used, unused = Homes(), torch.ones(1), torch.ones(1)
    homes.assign(used, 1)
    assert (owner_of(used, homes), owner_of(unused, homes)) == (1, 0)


class OtherRank:
    """A group of this rank and one other, which would use recording `found` and could use `accepted`."""

    def __init__(self, found: int, accepted: set[int]) -> None:
        self.found, self.accepted, self.asked = found, accepted, 0

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        if self.asked == 1:
            return torch.maximum(tensor, torch.tensor([self.found, -self.found]))
        missing = [number not in self.accepted for number in range(1, len(tensor) + 1)]
        return torch.maximum(tensor, torch.tensor(missing, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("found", "accepted", "other", "expected"),
    [
        (2, {2}, OtherRank(2, {2}), 2),
        (0, set(), OtherRank(0, set()), 0),
        (2, {2}, OtherRank(0, set()), 0),
        (3, {1, 3}, OtherRank(2, {1, 2}), 1),
        (3, {2, 3}, OtherRank(2, {1, 2}), 2),
        (1, {1}, OtherRank(4, {4}), 0),
    ],
)
def test_ranks_use_the_newest_recording_that_all_can_use(
    found: int, accepted: set[int], other: OtherRank, expected: int
) -> None:
    def agreed(backend: RankBackend) -> int:
        backend.pipeline = other  # type: ignore[assignment]
        return backend.in_common(found, lambda: accepted)

    number = on_ranks(lambda backend: agreed(backend) if backend.is_planner else None)[0]
    assert number == expected
    assert other.asked == (2 if found != other.found and found and other.found else 1)


def test_the_device_type_of_the_mesh_chooses_how_values_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, values of ranks on GPUs went through the CPU, whatever the mesh."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    ranks: Any = SimpleNamespace(index=0, size=2, device_type="cuda", devices=(torch.device("cuda:0"),) * 2)
    communicator: Any = SimpleNamespace(ranks=ranks, breakers=[])
    values = values_of(communicator)
    assert isinstance(values, DirectValues)
    assert values.streams is not None
    for size, kind in ((2, "cpu"), (1, "cuda")):  # a pipeline of one rank sends nothing
        ranks.size, ranks.device_type = size, kind
        assert isinstance(values_of(communicator), GlooValues)
