"""Settings of kernels: read at once, written where they differ, and set again for the very part of a forward that sets them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pipecompile as pc
from pipecompile.torch_private.kernel_settings import kernel_settings, set_kernel_settings

CHANGES: dict[str, Any] = {
    "flash_sdp": False,
    "mem_efficient_sdp": False,
    "mkldnn": False,
    "cudnn_benchmark": True,
    "deterministic": "warn",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_read_as_it_was_written(name: str) -> None:
    before = kernel_settings()
    try:
        set_kernel_settings(((name, CHANGES[name]),))
        assert dict(kernel_settings()) == dict(before) | {name: CHANGES[name]}
    finally:
        set_kernel_settings(before)
    assert kernel_settings() == before


class Attention(nn.Module):
    """Computes attention by the kernel of mathematics, and one layer without oneDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.inside, self.outside = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        with sdpa_kernel(SDPBackend.MATH):
            x = self.inside(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        with torch.backends.mkldnn.flags(enabled=False):
            return self.outside(x)


def _model(seen: list[Any] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), nn.Tanh(), Attention(), nn.Linear(16, 4))
    for layer in () if seen is None else (model[0].inside, model[2].outside, model[3]):
        layer.register_forward_hook(lambda *_: seen.append(kernel_settings()))
    return model


@pytest.mark.parametrize(
    "options", [{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}, {"compile_stages": "eager"}], ids=str
)
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_a_stage_computes_with_the_kernels_that_its_part_of_the_forward_sets(options: dict[str, Any]) -> None:
    seen: list[Any] = []
    model, before = _model(None if "compile_stages" in options else seen), kernel_settings()
    eager, x, target = copy.deepcopy(_model()), torch.randn(8, 12, 16), torch.randn(8, 12, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=4, loss_fn=F.mse_loss, cost="analytic", **options)
    seen.clear()
    pipe.step(x, target=target)
    assert kernel_settings() == before
    math = dict(before) | {"flash_sdp": False, "mem_efficient_sdp": False, "cudnn_sdp": False}
    if "compile_stages" not in options:
        assert {tuple(one) for one in seen} == {
            tuple(math.items()),
            tuple((dict(before) | {"mkldnn": False}).items()),
            before,
        }
    for part, label in zip(x.chunk(4), target.chunk(4), strict=True):
        (F.mse_loss(eager(part), label) / 4).backward()
    for one, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, wanted.grad)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_threads_share_the_settings_of_the_process() -> None:
    pipe, before = (
        pc.compile(_model(), 2, n_microbatches=4, loss_fn=F.mse_loss, cost="analytic", dispatch="threads"),
        kernel_settings(),
    )
    with pytest.warns(pc.RecordingWarning, match="sets kernels for a part of its forward"):
        pipe.step(torch.randn(8, 12, 16), target=torch.randn(8, 12, 4))
    for _ in range(20):
        pipe.step(torch.randn(8, 12, 16), target=torch.randn(8, 12, 4))
        assert kernel_settings() == before


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_settings_are_those_of_before_after_an_error_in_such_a_part() -> None:
    model, before = _model(), kernel_settings()
    pipe = pc.compile(
        model, 2, example_args=(torch.randn(8, 12, 16),), n_microbatches=4, loss_fn=F.mse_loss, cost="analytic"
    )

    def fail(*_: Any) -> None:
        raise RuntimeError("a hook fails")

    model[0].inside.register_forward_hook(fail)
    with pytest.raises(Exception, match="a hook fails"):
        pipe.step(torch.randn(8, 12, 16), target=torch.randn(8, 12, 4))
    assert kernel_settings() == before


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_the_text_of_a_graph_has_them() -> None:
    from pipecompile.tracing.graph_parser import parse_graph

    graph = pc.trace(_model(), torch.randn(2, 12, 16))
    text = str(graph)
    assert ", kernel flash_sdp False, kernel mem_efficient_sdp False" in text
    assert ", kernel mkldnn False" in text
    assert str(parse_graph(text)) == text


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_what_the_user_changes_later_counts() -> None:
    """The kernels that a layer asks for, and those outside: a part sets all that its context manager sets."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.backend = nn.Linear(16, 48), SDPBackend.MATH

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, before = nn.Sequential(Chosen(), nn.Tanh(), Chosen()), kernel_settings()
    eager, x = copy.deepcopy(model), torch.randn(8, 12, 16)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=4, loss_fn=torch.Tensor.mean, cost="analytic")
    changes = {
        "first": lambda: None,
        "outside": lambda: torch.backends.cuda.enable_math_sdp(False),
        "attribute": lambda: choose(),
    }

    def choose() -> None:
        for layer in (model[0], model[2], eager[0], eager[2]):
            layer.backend = SDPBackend.FLASH_ATTENTION

    try:
        for name, change in changes.items():
            change()
            model.zero_grad()
            eager.zero_grad()
            pipe.step(x)
            for part in x.chunk(4):
                (eager(part).mean() / 4).backward()
            for one, wanted in zip(model.parameters(), eager.parameters(), strict=True):
                assert torch.equal(one.grad, wanted.grad), name
    finally:
        set_kernel_settings(before)


def test_the_new_attributes_of_precision_are_no_obstacle() -> None:
    """torch refuses to read the old setting where the new attributes are used, and every step reads settings."""
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        pipe = pc.compile(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), 2, n_microbatches=2, loss_fn=F.mse_loss, cost="analytic"
        )
        assert pipe.step(torch.randn(4, 4), target=torch.randn(4, 2)).isfinite()
    finally:
        matmul.fp32_precision = before
