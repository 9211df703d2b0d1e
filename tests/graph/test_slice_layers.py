from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as all_modules
from torch.utils.flop_counter import FlopCounterMode

import pipecompile as pc
from pipecompile.errors import PlanError
from pipecompile.graph.sequence_flow import SequenceFlow
from tests.support.decoders import Between, Decoder, tokens_and_labels


def flow_of(model: nn.Module) -> SequenceFlow:
    graphs = [pc.trace(model, tokens_and_labels(3, length)[0]) for length in (4, 16)]
    return SequenceFlow(*graphs, 4, 4)


def nothing(*_: object) -> None:
    return None


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda layer: layer.register_forward_hook(nothing),
    "before forward": lambda layer: layer.register_forward_pre_hook(nothing),
    "backward": lambda layer: layer.register_full_backward_hook(nothing),
    "before backward": lambda layer: layer.register_full_backward_pre_hook(nothing),
}
GLOBAL: tuple[Callable[..., torch.utils.hooks.RemovableHandle], ...] = (
    all_modules.register_module_forward_hook,
    all_modules.register_module_forward_pre_hook,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_layers_with_hooks_are_refused(kind: str, *, late: bool) -> None:
    """They ran once per slice: what clips a gradient by its norm clipped that of a slice."""
    model = Decoder()
    if late:
        flow = flow_of(model)
    HOOKS[kind](model.blocks[1].up)
    with pytest.raises(PlanError, match=r"cannot run on slices of a sequence: blocks\.1\.up") as caught:
        (flow.check_layers if late else lambda: flow_of(model))()
    assert "its hook nothing would run once per slice" in caught.value.why
    assert "decoders.py" in caught.value.where


@pytest.mark.parametrize("register", GLOBAL)
def test_hooks_of_all_modules_are_refused_but_those_of_torch(
    register: Callable[..., torch.utils.hooks.RemovableHandle],
) -> None:
    flow = flow_of(Decoder())
    with FlopCounterMode(display=False):
        flow.check_layers()
    handle = register(nothing)
    try:
        with pytest.raises(PlanError, match="cannot run on slices of a sequence: embed"):
            flow.check_layers()
    finally:
        handle.remove()
    flow.check_layers()


@pytest.mark.parametrize("kind", ["layer", "function", "later"])
def test_gradients_by_frequency_are_refused(kind: str) -> None:
    """A slice counted its own tokens."""
    model = Decoder()
    if kind == "function":
        weight = nn.Parameter(torch.randn(20, 16))
        model = Between(lambda m, x: x + F.embedding(x.argmax(-1), m.table, scale_grad_by_freq=True))
        model.table = weight
    elif kind == "later":
        flow = flow_of(model)
    if kind != "function":
        model.embed.scale_grad_by_freq = True
    with pytest.raises(PlanError, match="cannot run on slices of a sequence: embed") as caught:
        (flow.check_layers if kind == "later" else lambda: flow_of(model))()
    assert "scale_grad_by_freq=True counts tokens" in caught.value.why
