"""Sizes of micro-batches, in samples, without a compilation: a stand-in for the compile cache finds specializations."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import sympy
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import FlatInputs, flatten
from pipecompile.batching.microbatches import split_sizes
from pipecompile.driver.batch_split import candidate_batches, first_batch, of_two_samples, on_one_side
from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.errors import InputError, RecordingWarning
from pipecompile.tracing.fakes.batch_symbol import Guard
from tests.support.compilations import mini_batch, options_of
from tests.support.eager import accumulate, assert_same, square_loss

MODEL = nn.Identity()
SIZE = sympy.Symbol("s", integer=True, positive=True)
ABOVE_TWO = Guard(SIZE, SIZE > 2, "net.py:7 in forward")


def inputs_of(samples: int, **batch_dims: Any) -> FlatInputs:
    def forward(x: Any, texts: Any = None) -> None: ...

    texts = {"texts": list(range(samples))} if batch_dims else {}
    return flatten(forward, (torch.zeros(samples, 4),), texts, batch_dims)


class Lists(nn.Module):
    """A model whose input is a list with one tensor per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return self.last(self.first(torch.stack(rows)).relu())


@pytest.mark.parametrize("first", [8, 3])
def test_a_batch_leaves_no_single_sample_to_a_batchnorm(first: int) -> None:
    """Its training forward refuses a single value per channel. A frozen layer does not normalise by the batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, n_microbatches=4, loss_fn=square_loss, batch_norm="each", devices=["cpu"] * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordingWarning)
        for samples in (first, 5, 7, 9, 3):
            x = torch.randn(samples, 4)
            assert torch.equal(pipe.step(x), accumulate(eager, x, min(4, samples // 2)))
    assert_same(model, eager)
    *others, warning = caught
    assert len(others) == (first < 4)  # of fewer samples than micro-batches
    assert "layer 1, which refuses" in str(warning.message)
    assert pipe.eval().step(torch.randn(3, 4)) > 0
    assert pipe.program.n_microbatches == 3


def test_a_fixed_schedule_and_a_single_sample_are_left_alone() -> None:
    batch = mini_batch(MODEL, 3, torch.zeros(3, 4))
    assert of_two_samples(batch, options_of()).sizes == (3,)
    assert of_two_samples(batch, options_of(schedule=pc.build_schedule("gpipe", 2, 3))) is batch
    alone = mini_batch(MODEL, 1, torch.zeros(1, 4))
    assert of_two_samples(alone, options_of()) is alone


def test_inputs_without_a_batch_are_one_micro_batch() -> None:
    inputs = flatten(MODEL.forward, (torch.zeros(4),), {}, {"input": None})
    assert inputs.samples is None
    options = options_of(n_microbatches="auto")
    assert split_sizes(inputs, 4) == (1,)
    assert [batch.sizes for batch in candidate_batches(inputs, options)] == [(1,)]


def test_lists_go_into_equally_long_micro_batches_with_one_warning() -> None:
    pipe = pc.compile(Lists(), 2, n_microbatches=4, batch_dims={"rows": list}, loss_fn=square_loss, devices=["cpu"] * 2)
    rows = [torch.randn(4) for _ in range(9)]
    with pytest.warns(RecordingWarning, match="lists of 9 samples go into 3 micro-batches instead of 4"):
        pipe.step(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        pipe.step(rows)
        pipe.step(rows[:8])
        pipe.step(rows[:3])
    assert pipe.program.n_microbatches == 3


def test_auto_compares_several_splits_and_records_an_even_one() -> None:
    options = options_of(n_microbatches="auto")
    candidates = candidate_batches(inputs_of(10), options)
    assert [batch.sizes for batch in candidates][:3] == [(10,), (5, 5), (4, 3, 3)]
    assert [len(batch.sizes) for batch in candidates] == [1, 2, 3, 4, 6, 8]
    assert first_batch(candidates, options).sizes == (5, 5)  # the most equal micro-batches, at most the default of 4


def test_a_number_or_lists_leave_nothing_to_compare() -> None:
    options = options_of(n_microbatches=3)
    candidates = candidate_batches(inputs_of(8), options)
    assert [batch.sizes for batch in candidates] == [(3, 3, 2)]
    assert first_batch(candidates, options) is candidates[0]
    auto = options_of(n_microbatches="auto")
    assert [b.sizes for b in candidate_batches(inputs_of(8, texts=list), auto)] == [(2, 2, 2, 2)]


def test_fewer_micro_batches_are_served_by_the_first_specialization_that_accepts_their_sizes() -> None:
    tried: list[tuple[int, ...]] = []
    served: Any = object()

    def find(sizes: tuple[int, ...]) -> Any:
        tried.append(sizes)
        return served if min(sizes) > 2 else None

    batch = mini_batch(MODEL, 4, torch.zeros(11, 4))
    with pytest.warns(RecordingWarning, match=r"net.py:7 .*11 samples go into 3 micro-batches instead of 4 of 2 and 3"):
        specialization, fewer = on_one_side(batch, ABOVE_TWO, options_of(), WarningsOnce(), find)
    assert specialization is served
    assert fewer.sizes == (4, 4, 3)
    assert fewer.whole is batch.whole
    assert tried == [(4, 4, 3)]


def test_without_a_specialization_micro_batches_get_one_size() -> None:
    batch = mini_batch(MODEL, 4, torch.zeros(10, 4))
    with pytest.warns(RecordingWarning, match="10 samples go into 2 micro-batches instead of 4"):
        specialization, fewer = on_one_side(batch, ABOVE_TWO, options_of(), WarningsOnce(), lambda sizes: None)
    assert specialization is None
    assert fewer.sizes == (5, 5)


def test_a_schedule_of_a_fixed_number_is_refused() -> None:
    batch = mini_batch(MODEL, 4, torch.zeros(11, 4))
    options = options_of(schedule=pc.build_schedule("gpipe", 2, 4))
    with pytest.raises(InputError, match="branches on the batch size: batch_size > 2") as caught:
        on_one_side(batch, ABOVE_TWO, options, WarningsOnce(), lambda sizes: None)
    assert caught.value.where == "net.py:7 in forward, and micro-batches of 2 and 3 samples"
    assert "multiple of 4 samples" in caught.value.hint
