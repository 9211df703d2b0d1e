"""Cases in which values go straight from rank to rank, as they do between GPUs, with gloo for NCCL: each must be as in one process.

Two kinds of streams: those of a CPU, where a message is over when it returns, and emulated ones, each a thread that is late by chance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import pipecompile as pc
from pipecompile.distributed import rank_backend, rank_executable
from pipecompile.distributed.messages import direct_values
from pipecompile.distributed.messages.direct_values import DirectValues
from pipecompile.ir import HOST
from pipecompile.runtime.dispatch import run_inline
from pipecompile.runtime.interpreter import Code
from pipecompile.runtime.registers import Frame
from tests.distributed import cases, listed, meshes
from tests.distributed.case_models import CONVOLUTIONAL, LANGUAGE, mean_square, unet
from tests.support.emulated import EmulatedStreams

SENT: list[str] = []
"""Names of the values that this rank has sent over links."""


class CountedValues(DirectValues):
    def _launched(self, peer: int, name: str, work: Any) -> None:
        SENT.append(name)
        super()._launched(peer, name, work)


@contextmanager
def direct() -> Iterator[None]:
    """Let ranks on CPUs use the transport of GPUs inside the context."""
    with (
        patch.object(rank_backend, "DIRECT_TYPES", {"cpu", "cuda"}),
        patch.object(rank_backend, "DirectValues", CountedValues),
    ):
        yield


def between_devices(case: Callable[[], Any]) -> Callable[[], Any]:
    """Return the case on the transport of GPUs; it fails unless values went over links."""

    def run() -> Any:
        SENT.clear()
        with direct():
            result = case()
        assert any(SENT), "no value went over a link"
        return result

    return run


class RankEmulatedStreams(EmulatedStreams):
    """Emulated streams of one rank. A run begins when what was launched before is over, and ends likewise."""

    def __init__(self, _device: torch.device, size: int) -> None:
        super().__init__(seed=size)

    def apart(self, source: int, target: int) -> bool:
        return source != HOST


def run_to_the_end(code: Code, frame: Frame) -> None:
    """Run a row, and wait for its streams: then the losses that the host sends on are tensors, as on a GPU they are at once."""
    run_inline(code, frame)
    assert isinstance(code.streams, RankEmulatedStreams)
    code.streams.finish()


def on_emulated_streams(case: Callable[[], Any]) -> Callable[[], Any]:
    """Return the case on the transport of GPUs, with streams that are late by chance."""

    def run() -> Any:
        with (
            patch.object(direct_values, "RankStreams", RankEmulatedStreams),
            patch.object(rank_executable, "run_inline", run_to_the_end),
        ):
            return between_devices(case)()

    return run


def frozen_between_steps() -> Any:
    """Train three steps, the first layer frozen in the second, with a batch of another size in the third, and compare to eager."""
    torch.manual_seed(4)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).double()
    eager, worst = copy.deepcopy(model), 0.0
    pipe = pc.compile(model, 2, mesh=cases.pair_mesh()["pp"], loss_fn=mean_square, n_microbatches=3, cost="analytic")
    for step, size in enumerate((9, 9, 7)):
        for layers in (model, eager):
            layers[0].requires_grad_(step != 1)
        x = torch.randn(size, 6).double()
        pipe.step(x)
        mean_square(eager(x)).backward()
        expected = dict(eager.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert (parameter.grad is None) == (expected[name].grad is None)
            if parameter.grad is not None:
                worst = max(worst, float((parameter.grad - expected[name].grad).abs().max()))
    return {"worst": worst, "sent": len(SENT)}


def with_another_batch() -> str:
    """Return the error of a step in which the second rank of each pair has one sample fewer, in as many micro-batches."""
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    pipe = pc.compile(model, 2, mesh=cases.pair_mesh()["pp"], loss_fn=mean_square, n_microbatches=3, cost="analytic")
    pipe.step(torch.randn(9, 6))
    try:
        pipe.step(torch.randn(9 - dist.get_rank() % 2, 6))
    except pc.PipecompileError as error:
        return str(error)
    return ""


by_pairs = cases.by_pairs

CASES: dict[str, Callable[[], Any]] = {
    "direct plain": between_devices(lambda: by_pairs(unet, LANGUAGE, *cases.some(cases.PLAIN))),
    "direct looped": between_devices(lambda: by_pairs(unet, LANGUAGE, *cases.LOOPED)),
    "direct vee": between_devices(lambda: by_pairs(LANGUAGE, unet, *cases.VEE)),
    "direct mixed": between_devices(cases.CASES["mixed"]),
    "direct on four": between_devices(lambda: cases.by_all(unet, "zb-h2")),
    "direct tied on four": between_devices(lambda: cases.by_all(LANGUAGE, "1f1b")),
    "direct recomputed": between_devices(
        lambda: by_pairs(unet, LANGUAGE, "1f1b", checkpoint="always", batch_norm="deferred")
    ),
    "direct emulated": on_emulated_streams(lambda: by_pairs(unet, LANGUAGE, *cases.some(cases.PLAIN))),
    "direct emulated looped": on_emulated_streams(lambda: by_pairs(CONVOLUTIONAL, unet, *cases.LOOPED)),
    "direct copies": between_devices(cases.replicated),
    "direct sharded": between_devices(lambda: meshes.trained(meshes.mesh_of((2, 2), "dp_shard", "pp"))),
    "direct scaler": between_devices(lambda: meshes.scaled(meshes.mesh_of((4,), "pp"))),
    "direct predicted": between_devices(cases.predicted),
    "direct listed": between_devices(listed.CASES["listed"]),
    "direct frozen": between_devices(frozen_between_steps),
    "direct other batch": between_devices(with_another_batch),
}
"""Cases by name, in the order in which ranks run them."""
