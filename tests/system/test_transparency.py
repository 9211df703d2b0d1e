"""The promise: what a pipeline computes equals a plain micro-batched eager loop, for every model x stages x schedule x count
(`--full`; without, one of twelve pairs of model and stages, two of the eight pairs of schedule and count, and large models with fewer
blocks).

Bit-equal, unless a value is used more than once in another stage: then that stage sums its own uses first, which is
another order of the same sum than eager's. Those models run in float64, where the difference is far below 1e-8.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, assert_same, square_loss
from tests.support.models import ZOO, deterministic
from tests.support.small_models import with_small_models

REORDERED = {"densenet121": 1e-8, "googlenet": 1e-8}
"""Models with values that are used more than once across a cut, and the tolerance that their gradients get."""

PINNED = {"deeplabv3_resnet50": ["classifier.0"]}
"""Modules whose branches share a stage: in several stages, the gradients of their common input are summed stage by stage."""

BATCH = dict.fromkeys(ZOO, 7) | {"deeplabv3_resnet50": 14, "densenet121": 14}
"""Seven micro-batches of one sample; of two where BatchNorm would see a single value per channel."""

COUNTS = (1, 3, 4, 7)


def configurations(index: int, *, full: bool) -> list[tuple[str, int]]:
    """Schedule and count: all pairs, or two with other schedules and counts; the models together have all of them."""
    pairs = [(schedule, count) for count in COUNTS for schedule in ("gpipe", "1f1b")]
    return pairs if full else [pairs[index % 8], pairs[(index + 3) % 8]]


@pytest.fixture(autouse=True, scope="module")
def _small_models(pytestconfig: pytest.Config) -> Iterator[None]:
    """Use smaller models without `--full`, which runs them as their authors wrote them."""
    with pytest.MonkeyPatch.context() as patch:
        if not pytestconfig.getoption("--full"):
            with_small_models(patch)
        yield


@lru_cache(maxsize=1)
def original(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, size = ZOO[name]
    torch.manual_seed(0)
    model, x = deterministic(make()), torch.randn(BATCH[name], 3, size, size)
    return (model.double(), x.double()) if name in REORDERED else (model, x)


@lru_cache(maxsize=4)  # the counts of one model
def reference(name: str, count: int) -> tuple[nn.Module, torch.Tensor]:
    model, x = original(name)
    model = copy.deepcopy(model)
    return model, accumulate(model, x, count)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("n_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ZOO)
def test_step_equals_the_plain_loop(name: str, n_stages: int, pytestconfig: pytest.Config) -> None:
    full, index = pytestconfig.getoption("--full"), list(ZOO).index(name)
    start, x = original(name)
    model = copy.deepcopy(start)
    pipe = pc.compile(
        model,
        n_stages,
        example_args=(x,),
        n_microbatches=max(COUNTS),
        keep_together=PINNED.get(name, ()),
        loss_fn=square_loss,
        cost="analytic",
        devices=["cpu"] * n_stages,
    )
    for schedule, count in configurations(index, full=full):
        model.load_state_dict(start.state_dict())
        model.zero_grad()
        loss = pipe.reschedule(schedule, count).step(x)
        assert (pipe.schedule.name, pipe.program.n_microbatches) == (schedule, count)
        expected, expected_loss = reference(name, count)
        tolerance = REORDERED.get(name, 0.0)
        torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=0.0)
        assert_same(model, expected, tolerance)
    del pipe
    gc.collect()  # an fx graph and its module hold each other, and through them the weights


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [name for name in ZOO if name not in REORDERED])
def test_call_equals_eager(name: str) -> None:
    """`pipe(x)` in training and evaluation mode: outputs bit-equal to the micro-batches of eager, put together."""
    model, x = original(name)
    model, eager = copy.deepcopy(model), copy.deepcopy(model)
    pipe = pc.compile(model, 3, example_args=(x,), n_microbatches=4, cost="analytic", devices=["cpu"] * 3)
    for mode in (True, False):
        pipe.train(mode)
        eager.train(mode)
        parts = [torch.utils._pytree.tree_leaves(eager(part)) for part in torch.tensor_split(x, 4)]
        wanted = [torch.cat(leaves) for leaves in zip(*parts, strict=True)]
        made = torch.utils._pytree.tree_leaves(pipe(x))
        assert len(made) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
    assert_same(model, eager)
