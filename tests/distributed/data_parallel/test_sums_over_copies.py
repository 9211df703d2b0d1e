"""Copies of a pipeline with parts of other sizes (uneven.py), on ranks that are processes; sums over copies without processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.data_parallel.sums_over_copies import sum_of_totals, summed
from pipecompile.driver.evaluation import RunningTotal
from pipecompile.errors import InputError, PlanError
from tests.distributed import uneven
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators
from tests.support.warm_python import WarmPython

ON_TWO = (
    "alone",
    "averaged",
    "counted",
    "evaluated",
    "evaluated, dp_shard",
    "dp, mean",
    "dp, ignored",
    "dp, masked",
    "dp_shard, weighted",
    "schedule zb-h1",
    "placeholders, ignored",
    "checkpoint",
    "norm, dp_shard",
)
ON_FOUR = ("alone", "dp, weighted", "dp_shard, masked", "norm")
"""Cases that run on two copies of one stage and of two; with --full, all do."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, warm_python: WarmPython) -> dict[int, dict[str, Any]]:
    """The results of all ranks, per number of ranks and case."""
    full = request.config.getoption("--full")
    said = {}
    for world, only in ((2, () if full else ON_TWO), (4, () if full else ON_FOUR)):
        printed = warm_python.run("tests.distributed.uneven", str(world), *only)
        said[world] = json.loads(printed.splitlines()[-1])
    return said


def of_case(results: dict[int, dict[str, Any]], case: str) -> list[Any]:
    """Return what all ranks say of a case."""
    every = [one for by_case in results.values() for one in by_case.get(case, ())]
    return every or pytest.skip("with --full")


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "case", [name for name in uneven.CASES if name not in ("counted", "evaluated", "evaluated, dp_shard")]
)
def test_parts_of_any_sizes_are_trained_as_one_process_does(results: dict[int, dict[str, Any]], case: str) -> None:
    """Parts of 4 and 2, 3 and 0, 8 and 8, 1 and 5 samples in 4 micro-batches: copies disagreed about the graph, before."""
    for worst in of_case(results, case):
        assert isinstance(worst, float), worst
        assert worst < 1e-11


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", ["evaluated", "evaluated, dp_shard"])
def test_an_evaluation_is_of_the_batches_of_all_copies(results: dict[int, dict[str, Any]], case: str) -> None:
    for each in of_case(results, case):
        assert isinstance(each, list), each
        assert each[0] < 1e-14
        assert "there is nothing to evaluate" in each[1]


@pytest.mark.timeout(1300)
def test_what_a_loss_function_counts_is_summed_over_copies(results: dict[int, dict[str, Any]]) -> None:
    for each in results[2]["counted"]:
        assert isinstance(each, list), each
        worst, empty, others, target = each
        assert worst < 1e-14
        assert "the batch is empty\n  where  0 samples on all copies of the pipeline" in empty
        assert "the batch sizes of the target and the inputs disagree\n  where  target: 5, inputs: 0" in target
        assert "the copies of the pipeline have other values to sum" in others


class Other(CollectiveGroup):
    """A group of this copy and one with `values` and `text` of its own."""

    size = 2

    def __init__(self, values: list[float], text: str | None = None) -> None:
        self.values, self.text = values, text

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        others = self.values if len(self.values) == len(row) else row.tolist()  # the row of the call: the same call
        return torch.stack([row, torch.tensor(others, dtype=row.dtype)])

    def all_gather_text(self, text: str) -> list[str]:
        return [text, text if self.text is None else self.text]


def test_sums_keep_the_kinds_of_their_values() -> None:
    values = {"count": 3, "share": 0.5, "flag": True, "bins": torch.tensor([1, 2]), "seen": torch.tensor([True, False])}
    sums = summed(values, Other([4, 0.25, 1, 10, 20, 1, 0]))
    assert (sums["count"], sums["share"], sums["flag"]) == (7, 0.75, 2)
    assert sums["bins"].tolist() == [11, 22]
    assert sums["bins"].dtype == torch.int64
    assert sums["seen"].tolist() == [2, 0]
    assert summed({}, Other([])) == {}


def test_values_that_cannot_be_summed_are_refused() -> None:
    with pytest.raises(InputError, match="a str cannot be summed"):
        summed({"a": "text"}, Other([0]))
    with pytest.raises(PlanError, match="the copies of the pipeline have other values to sum"):
        summed({"a": 1}, Other([0], "another structure"))


def test_a_copy_without_a_metric_adds_nothing_to_it() -> None:
    def run(communicator: ThreadCommunicator) -> tuple[int, float, dict[str, float]]:
        communicator.connect()
        own, here = RunningTotal(is_mean=True), communicator.ranks.index
        own.add(torch.tensor(2.0 + here), 4, {"right": 3.0})  # rank 0 has a placeholder for the target
        group = Other([6.0, 10.0, 0.0, 12.0], '["right","extra"]')
        total = sum_of_totals(own, group, communicator, 1)
        return total.samples, float(total.loss), total.metrics

    for samples, loss, metrics in run_communicators(2, run):
        assert (samples, loss) == (10, 4 * 3.0 + 10.0)
        assert metrics == {"right": 12.0, "extra": 12.0}
