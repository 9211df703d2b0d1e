"""What the user has around a step sees the step alone, not the recording, the costs and the check of its first run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pipecompile as pc
from pipecompile.driver.unwatched import unwatched
from tests.support.eager import accumulate, assert_same

X, Y = torch.randn(8, 4), torch.randint(0, 4, (8,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y.relu() + torch.zeros(4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 4))


def pipeline(inner: nn.Module, **options: Any) -> pc.Pipeline:
    options = {"cost": "analytic", "loss_fn": F.cross_entropy, "n_microbatches": 2} | options
    return pc.compile(inner, 2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("checkpoint", "forwards"), [("never", 1), ("always", 2)])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_flop_counter_counts_the_step(checkpoint: str, forwards: int, is_first: bool) -> None:
    """It counted the recording too, and the steps after it failed under `no_grad`."""
    pipe = pipeline(model(), checkpoint=checkpoint)
    if not is_first:
        pipe.step(X, target=Y)
    forward = 2 * 8 * 4 * 4 * 3
    with FlopCounterMode(display=False) as counter:
        pipe.step(X, target=Y)
    # the backward has two products a layer, but the first layer has no gradient of its input
    assert counter.get_total_flops() == forward * forwards + 2 * forward - forward // 3
    for _ in range(2):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            pipe(X)
        assert counter.get_total_flops() == forward


COMPUTE = ("addmm", "relu", "_log_softmax", "nll_loss_forward", "nll_loss_backward")


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_same_operators_in_the_first_step_as_in_the_second() -> None:
    pipe, seen = pipeline(model(), dispatch="inline"), []
    for _ in range(2):
        pipe.zero_grad()
        with Calls() as mode:
            pipe.step(X, target=Y)
        seen.append({name: mode.names.count(name) for name in COMPUTE})
    assert seen[0] == seen[1] == dict.fromkeys(COMPUTE, 2) | {"addmm": 6, "relu": 4}


@contextmanager
def doubled_outputs() -> Iterator[None]:
    handle = register_module_forward_hook(lambda _module, _inputs, made: made * 2)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def doubled_inputs() -> Iterator[None]:
    def double(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        return tuple(one * 2 for one in inputs) if isinstance(module, Block) else None

    handle = register_module_forward_pre_hook(double)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("hooked", [doubled_outputs, doubled_inputs])
@pytest.mark.parametrize("is_first", [True, False])
def test_hooks_of_all_modules_run_once_for_each_module_of_the_model(
    hooked: Callable[[], AbstractContextManager[None]], is_first: bool
) -> None:
    """The hooks of layers ran on the recording and on the pipeline too, as if they were modules of the model."""
    inner = model()
    eager, pipe = copy.deepcopy(inner), pipeline(inner)
    if not is_first:
        pipe.step(X, target=Y)
    for _ in range(2):
        inner.zero_grad()
        eager.zero_grad()
        with hooked():
            loss = accumulate(eager, X, 2, F.cross_entropy, Y)
            assert torch.equal(pipe.step(X, target=Y), loss)
            with torch.no_grad():
                assert torch.equal(pipe(X), torch.cat([eager(part) for part in X.chunk(2)]))
        assert_same(inner, eager)


def test_hooks_on_saved_tensors_may_be_disabled_around_the_first_step() -> None:
    """The costs failed: they look at what operators save."""
    inner = model()
    eager = copy.deepcopy(inner)
    with disable_saved_tensors_hooks("none here"):
        loss = pipeline(inner, cost="profile").step(X, target=Y)
        with pytest.raises(RuntimeError, match="none here"), torch.autograd.graph.save_on_cpu():
            pass
    assert torch.equal(loss, accumulate(eager, X, 2, F.cross_entropy, Y))


def test_everything_is_back_when_the_block_ends() -> None:
    with Calls() as outer, Calls() as inner, torch.autograd.detect_anomaly(check_nan=False), doubled_outputs():
        with unwatched():
            assert not torch.is_anomaly_enabled()
            torch.ones(1) + 1
        assert (outer.names, inner.names) == ([], [])
        assert torch.is_anomaly_enabled()
        assert torch.equal(nn.Identity()(torch.ones(1)), torch.full((1,), 2.0))
    assert outer.names == inner.names != []
