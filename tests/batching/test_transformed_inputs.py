"""Transforms of torch.func and forward-mode differentiation around a pipeline are refused with their reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import pipecompile as pc


@pytest.fixture
def pipe() -> pc.Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, cost="analytic")


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_a_transform_of_torch_func_is_refused(transform: object, pipe: pc.Pipeline) -> None:
    """The error said that the model fails without pipecompile, too."""
    with pytest.raises(
        pc.InputError, match=r"inside of a transform of torch\.func[^@]*on several ranks after pipe\.model"
    ):
        transform(lambda x: pipe(x).sum())(torch.randn(4, 4, 4))  # type: ignore[operator]


def test_torch_compile_around_a_pipeline_is_refused(pipe: pc.Pipeline) -> None:
    with pytest.raises(pc.InputError, match=r"inside of torch\.compile"):
        torch.compile(pipe, backend="eager")(torch.randn(4, 4))


def test_a_pipeline_in_a_checkpoint_compiles_at_its_first_call(pipe: pc.Pipeline) -> None:
    """The tensors of the recording and of its check went through the hooks of the checkpoint, whose count then was wrong."""
    x = torch.randn(4, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(pipe, x, use_reentrant=False).sum().backward()
    (expected,) = torch.autograd.grad(torch.cat([pipe.model(part) for part in x.chunk(2)]).sum(), x)
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_a_tangent_is_refused(pipe: pc.Pipeline) -> None:
    """The result had no tangent, silently."""
    x = torch.randn(4, 4)
    with forward_ad.dual_level():
        pipe(x)  # nothing has a tangent
        with pytest.raises(pc.InputError, match="has a tangent"):
            pipe(forward_ad.make_dual(x, torch.ones_like(x)))


def test_a_trace_of_torch_jit_is_refused(pipe: pc.Pipeline) -> None:
    """It failed with a TypeError of divmod."""
    pipe(torch.randn(4, 4))
    with pytest.raises(pc.InputError, match=r"inside of torch\.jit\.trace"):
        torch.jit.trace(pipe, torch.randn(4, 4))  # type: ignore[no-untyped-call]


def test_compile_of_a_pipeline_is_refused(pipe: pc.Pipeline) -> None:
    with pytest.raises(pc.InputError, match=r"compile\(\) of a pipeline"):
        pipe.compile(backend="eager")
