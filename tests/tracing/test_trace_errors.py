from __future__ import annotations

import linecache

import numpy as np
import pytest
import torch
from torch import nn

from pipecompile import InputError, TraceError
from pipecompile.tracing import trace


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.a, self.body = nn.Linear(4, 4), body

    def forward(self, *args):
        return self.body(self, *args)


def branches(m, x):
    return m.a(x) if x.sum() > 0 else x


def takes_item(m, x):
    return m.a(x) * x.max().item()


@pytest.mark.parametrize("body, code", [(branches, "PC101"), (takes_item, "PC102")])
def test_data_dependent_control_flow_is_refused_at_the_users_line(body, code):
    with pytest.raises(TraceError) as caught:
        trace(Body(body), torch.randn(3, 4))
    error, line = caught.value, body.__code__.co_firstlineno + 1
    assert error.code == code
    assert f"{__file__}:{line} in {body.__name__}" in error.where
    assert (error.file, error.line, error.function) == (__file__, line, body.__name__)
    assert error.source == linecache.getline(__file__, line).strip()
    assert str(error).startswith(f"{code} cannot trace: ")
    assert error.source in str(error)
    assert str(error).endswith(f"docs/errors.md#{code.lower()}")


def test_an_exception_in_forward_is_named_with_its_line():
    def fails(m, x):
        raise KeyError("who")

    with pytest.raises(TraceError, match="KeyError") as caught:
        trace(Body(fails), torch.randn(3, 4))
    assert "raise KeyError" in caught.value.where
    assert isinstance(caught.value.__cause__, KeyError)


def test_wrong_shapes_are_named_with_the_line():
    with pytest.raises(TraceError, match="Body raised RuntimeError") as caught:
        trace(Body(lambda m, x: m.a(x)), torch.randn(3, 5))
    assert __file__ in caught.value.where


def test_a_backward_hook_on_the_whole_model_is_refused():
    model = Body(lambda m, x: m.a(x))
    model.register_full_backward_hook(lambda module, given, made: None)
    with pytest.raises(TraceError, match="backward hook"):
        trace(model, torch.randn(3, 4))


def test_tensors_made_behind_the_recorders_back_are_right():
    for body in (
        lambda m, x: m.a(x) + torch.Tensor([1.0, 2, 3, 4]),
        lambda m, x: m.a(x) + torch.Tensor(4).fill_(2),
        lambda m, x: m.a(x) + torch.from_numpy(np.ones(4, "f")),
        lambda m, x: m.a(x) + torch.func.vmap(lambda row: row * 2)(x),
    ):
        model, x = Body(body), torch.randn(3, 4)
        assert torch.equal(trace(model, x)(x), model(x))


def test_inputs_must_share_a_batch():
    with pytest.raises(InputError, match="disagree"):
        trace(Body(lambda m, x, y: x), torch.randn(3, 4), torch.randn(2, 4))
    with pytest.raises(InputError, match="empty"):
        trace(Body(lambda m, x: x), torch.randn(0, 4))
    with pytest.raises(InputError, match="not an nn"):
        trace(len, torch.randn(3))


class Decides(nn.Module):
    """Cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x).tanh() if float(x.detach().sum()) < 1e9 else x


def in_one_statement(m, x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(m.part(x).sum(), x, create_graph=True)
    return m.a(gradient)


def in_two_statements(m, x):
    x = x.detach().requires_grad_()
    energy = m.part(x).sum()
    return m.a(torch.autograd.grad(energy, x, create_graph=True)[0])


def test_a_gradient_through_a_part_that_is_kept_whole():
    def with_part(body):
        model = Body(body)
        model.part = Decides()
        model.more = nn.Linear(9, 9)
        return model

    model, x = with_part(in_one_statement), torch.randn(3, 4)
    torch.testing.assert_close(trace(model, x)(x), model(x))
    with pytest.raises(
        TraceError, match=r"(?s)PC110.*a gradient goes through.*in_two_statements.*part.*: the gradients"
    ):
        trace(with_part(in_two_statements), x)


def test_a_model_that_exits_early_in_evaluation_is_told_of_the_model_itself():
    def exits(m, x):
        for _ in range(2):
            x = m.a(x)
            if not m.training and x.max() > 0.5:
                return x
        return x

    trace(Body(exits), torch.randn(3, 4))
    with pytest.raises(
        TraceError, match=r"(?s)PC101.*try .*pipe\.model\(x\), on several ranks after pipe\.model\.load"
    ):
        trace(Body(exits).eval(), torch.randn(3, 4))
