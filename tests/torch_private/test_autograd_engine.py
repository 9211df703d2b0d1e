"""The private parts of autograd do what torch's public ones do."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from pipecompile.torch_private import autograd_engine
from pipecompile.torch_private.autograd_engine import (
    FunctionNode,
    accumulate,
    hooks_of_tensor,
    hooks_registered,
    input_metadata,
    is_accumulation_watched,
    node_name,
    other_users,
    raw_saved_names,
    saved_tensor_hooks,
    saved_tensor_hooks_allowed,
    sequence_number,
    unpacked_name,
    will_accumulate,
)

pytestmark = pytest.mark.smoke


def graph() -> tuple[torch.Tensor, torch.Tensor, GradientEdge]:
    x, w = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    return x, w, get_gradient_edge(x * w)


def test_accumulate_adds_to_all_leaves() -> None:
    x, w, edge = graph()
    x.grad = torch.tensor([1.0])
    accumulate([edge], [torch.tensor([10.0])])
    assert (x.grad, w.grad) == (torch.tensor([31.0]), torch.tensor([20.0]))


def test_threads_of_gpus_get_the_context_variables_also_if_a_backward_begins_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loss on the CPU, of a stage on a GPU: Python of its backward saw the values of context variables of another thread."""
    ran = list[str]()
    monkeypatch.setattr(autograd_engine, "_has_accelerators", lambda: True)
    monkeypatch.setattr(autograd_engine, "_run_here", lambda *_, **__: ran.append("without"))
    monkeypatch.setattr(autograd_engine, "_engine_run_backward", lambda *_, **__: ran.append("with"))
    accumulate([get_gradient_edge(torch.ones(1, requires_grad=True))], [torch.ones(1)])
    assert ran == ["with"]


def test_accumulate_adds_to_the_named_weights_alone() -> None:
    x, w, edge = graph()
    accumulate([edge], [torch.tensor([10.0])], [w])
    assert (x.grad, w.grad) == (None, torch.tensor([20.0]))


def test_a_node_of_a_python_function_is_a_function_node() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    x = torch.ones(1, requires_grad=True)
    assert isinstance(Double.apply(x).grad_fn, FunctionNode)
    assert not isinstance((2 * x).grad_fn, FunctionNode)


def test_hooks_of_a_tensor_are_seen_until_they_are_removed() -> None:
    x = torch.ones(1, requires_grad=True)
    assert not hooks_of_tensor(x)
    before = hooks_registered()
    handle = x.register_hook(lambda gradient: gradient)
    assert hooks_of_tensor(x)
    assert hooks_registered() > before
    handle.remove()
    assert not hooks_of_tensor(x)


def test_hooks_on_saved_tensors_are_seen_inside_their_context() -> None:
    assert saved_tensor_hooks() is None
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        assert saved_tensor_hooks() is not None
    assert saved_tensor_hooks() is None


def test_a_node_tells_the_shape_of_its_gradient() -> None:
    assert tuple(input_metadata(torch.ones(2, 3, requires_grad=True).exp().grad_fn)[0].shape) == (2, 3)


def test_each_raw_name_of_a_node_has_an_unpacked_one() -> None:
    x = torch.ones(2, requires_grad=True)
    node = (x * x.detach()).grad_fn
    names = raw_saved_names(node)
    assert names
    unpacked = [getattr(node, unpacked_name(name)) for name in names]
    assert any(isinstance(value, torch.Tensor) for value in unpacked)
    assert unpacked_name("_raw_saved_tensors") == "saved_tensors"


def test_other_users_of_a_memory_are_counted() -> None:
    tensor = torch.zeros(4)
    assert other_users(tensor) == 0
    views = [tensor.view(2, 2), tensor[1:]]
    assert other_users(tensor) == len(views)
    del views
    assert other_users(tensor) == 0


def test_sequence_numbers_grow() -> None:
    x = torch.ones(1, requires_grad=True).sin()
    assert sequence_number(x.grad_fn) < sequence_number(x.cos().grad_fn)


def test_whether_something_holds_the_node_that_adds_to_a_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert not autograd_engine.is_accumulation_held(weight)
    with torch.no_grad():
        assert not autograd_engine.is_accumulation_held(weight)
    graph = weight * 2
    assert autograd_engine.is_accumulation_held(weight)
    del graph
    assert not autograd_engine.is_accumulation_held(weight)


def test_hooks_on_saved_tensors_are_allowed_where_the_user_has_disabled_them() -> None:
    with saved_tensor_hooks_allowed(), torch.autograd.graph.save_on_cpu():
        pass
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        with saved_tensor_hooks_allowed(), torch.autograd.graph.save_on_cpu():
            pass
        with pytest.raises(RuntimeError, match="none here"), torch.autograd.graph.save_on_cpu():
            pass


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.name = "scale"
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_the_name_of_a_node_is_that_of_its_class_whatever_its_function_calls_itself() -> None:
    x = torch.ones(1, requires_grad=True)
    assert [node_name(one.grad_fn) for one in (x * 2, Named.apply(x))] == ["MulBackward0", "NamedBackward"]


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_on_the_node_that_adds_to_grad_are_found_and_graphs_are_none(register: str) -> None:
    leaf = torch.zeros(2, requires_grad=True)
    assert not is_accumulation_watched(leaf)
    kept = (leaf * 2).sum()
    node = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert not is_accumulation_watched(leaf)
    handle = getattr(node, register)(lambda *_: None)
    assert is_accumulation_watched(leaf)
    handle.remove()
    assert not is_accumulation_watched(leaf)
    kept.backward()
    assert torch.equal(leaf.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_a_backward_that_returns_gradients_adds_to_none() -> None:
    leaf, seen = torch.zeros(2, requires_grad=True), []
    edge = get_gradient_edge(leaf)
    leaf.register_hook(lambda _: seen.append(will_accumulate(edge.node)))
    (leaf * 2).sum().backward()
    torch.autograd.grad((leaf * 2).sum(), leaf)
    assert seen == [True, False]
