"""`segmentation_models_pytorch.Unet`, unmodified: its skips go straight from the encoder's stage to the decoder's.

stage 0         stage 1      stage 2      stage 3
encoder ─┬────► encoder ───► decoder ───► decoder
         └──────── one copy, no stop ───► concat
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import torch

import pipecompile as pc
from pipecompile.ir import HOST, Op
from pipecompile.runtime import streams
from pipecompile.runtime.transport import Link
from pipecompile.tracing.node_facts import value_of
from tests.support.eager import accumulate, assert_same, square_loss

N_STAGES, COUNT = 6, 3


class CountingLink(Link):
    """Between two places that share memory, but it counts what passes."""

    sent: Counter[tuple[int, ...]] = Counter()

    def send(self, value: Any) -> Any:
        CountingLink.sent[tuple(value.shape)] += 1
        return value


@pytest.fixture(scope="module")
def pipe() -> Iterator[pc.Pipeline]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "link", lambda *_: CountingLink())
        torch.manual_seed(0)
        model = smp.Unet("resnet18", encoder_weights=None, classes=2)
        x = torch.randn(6, 3, 64, 64)
        yield pc.compile(
            model, N_STAGES, example_args=(x,), n_microbatches=COUNT, loss_fn=square_loss, cost="analytic",
            devices=["cpu"] * N_STAGES, dispatch="inline",
        )  # fmt: skip


def test_gradients_and_buffers_equal_eager(pipe: pc.Pipeline) -> None:
    """Decoder blocks use a skip once and the value below once, each in one stage: every sum keeps its order."""
    pipe.zero_grad()
    model, eager = pipe.model, copy.deepcopy(pipe.model)
    x = torch.randn(6, 3, 64, 64)
    loss = pipe.step(x)
    torch.testing.assert_close(loss, accumulate(eager, x, COUNT))
    assert_same(model, eager)


def test_a_skip_over_two_stages_is_copied_once_per_consumer_device(pipe: pc.Pipeline) -> None:
    skips = [
        route
        for route in pipe.plan.routes
        if route.source != HOST and any(end - route.source > 2 for end in route.consumers)
    ]
    assert skips, "the cut has no skip that passes over two stages"
    sends = Counter(
        instruction.reads[0].value.name
        for row in pipe.program.rows
        for instruction in row
        if instruction.op is Op.SEND and instruction.peer != HOST and instruction.reads[0].value.consumer is None
    )
    for route in pipe.plan.routes:
        if route.source != HOST:
            devices = {end for end in route.consumers if end != HOST}
            assert sends[route.value] == COUNT * len(devices), route.value


def test_what_the_program_sends_is_what_passes_the_links(pipe: pc.Pipeline) -> None:
    """Counted while it runs: nothing is relayed by the stages in between, forward or backward."""
    CountingLink.sent.clear()
    pipe.step(torch.randn(6, 3, 64, 64))
    shapes = {
        node.name: tuple(value_of(node).shape[1:])
        for node in pipe.graph.graph.nodes
        if hasattr(value_of(node), "shape")
    }
    expected: Counter[tuple[int, ...]] = Counter()
    for row in pipe.program.rows:
        for instruction in row:
            if instruction.op is Op.SEND and instruction.peer != HOST:
                expected[(6 // COUNT, *shapes[instruction.reads[0].value.name])] += 1
    assert CountingLink.sent == expected
