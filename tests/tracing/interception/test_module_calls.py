from __future__ import annotations

import copy
import functools
import threading
import warnings
from queue import SimpleQueue

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipecompile as pc
from pipecompile import TraceError
from pipecompile.tracing import trace


def rows(size: int) -> tuple[torch.Tensor]:
    return (torch.randn(size, 4, generator=torch.Generator().manual_seed(size)),)


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.a, self.b, self.c, self.body = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


class Square(torch.autograd.Function):
    """Its gradient is wrong on purpose: who recomputes it from the forward is found out."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        return x * x * scale

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * 77, None


def test_a_custom_autograd_function_is_one_node_with_its_own_gradient(agrees):
    graph = agrees(Body(lambda m, x: m.b(Square.apply(m.a(x), 2) + Square.apply(x, 3))), rows)
    names = [node.name for node in graph.graph.nodes]
    assert [name for name in names if "Square" in name] == ["Square", "Square_1"]
    assert "mul" not in names
    before = len(graph.graph.nodes)
    graph(*rows(2))
    assert len(graph.graph.nodes) == before, "running the graph records nothing"


BOUND = Square.apply
TABLE = {"square": BOUND}
PARTIAL = functools.partial(BOUND)


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square, self.a = BOUND, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            still = self.square(x, 5)
        return self.square(self.a(x), 2) + still


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.b(BOUND(m.a(x), 2)),
        lambda m, x: m.b(TABLE["square"](m.a(x), 2)),
        lambda m, x, square=BOUND: m.b(square(m.a(x), 2)),
        lambda m, x, square=PARTIAL: m.b(square(m.a(x), 2)),
    ],
)
def test_a_custom_function_that_was_bound_before_is_the_same_node(agrees, body):
    graph = agrees(Body(body), rows)
    names = [node.name for node in graph.graph.nodes]
    assert [name for name in names if "Square" in name] == ["Square"]
    assert "mul" not in names


def test_a_bound_custom_function_keeps_the_grad_mode_of_its_call(agrees):
    graph = agrees(Holding(), rows)
    assert [node.name for node in graph.graph.nodes if "Square" in node.name] == ["Square", "Square_1"]


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


IN_PLACE = DoubledInPlace.apply


def test_a_bound_custom_function_may_write_in_place(agrees):
    agrees(Body(lambda m, x: m.b(IN_PLACE(m.a(x) + 1))), rows)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_recorded_through(agrees, reentrant):
    graph = agrees(Body(lambda m, x: m.b(checkpoint(lambda h: m.c(h).relu(), m.a(x), use_reentrant=reentrant))), rows)
    assert [node.name for node in graph.graph.nodes if node.op.startswith("call_")] == ["a", "c", "relu", "b"]


def test_a_scripted_function_is_one_node():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        @torch.jit.script
        def swish(x):
            return x * torch.sigmoid(x)

    model = Body(lambda m, x: m.b(swish(m.a(x))))
    graph = trace(model, *rows(4))
    assert [node.name for node in graph.graph.nodes if node.op == "call_function"] == ["swish"]
    assert torch.allclose(graph(*rows(3)), model(*rows(3)))
    assert not graph.facts.guards


def test_the_length_of_a_tensor_stays_symbolic(agrees):
    graph = agrees(Body(lambda m, x: m.a(x).reshape(len(x) * 2, 2).sum() / len(x) + len([1, 2])), rows)
    assert not graph.facts.guards


def test_a_table_that_is_asked_about_the_batch_size_fixes_it():
    graph = trace(Body(lambda m, x: m.a(x) * {4: 1.0}.get(x.shape[0], 2.0)), *rows(4))
    assert [str(guard) for guard in graph.facts.guards] == ["Eq(batch_size, 4)"]
    assert graph.facts.batch_size == 4


def test_a_compiled_submodule_is_recorded_as_what_it_was(agrees):
    model = Body(lambda m, x: m.b(m.inner(m.a(x))))
    model.inner = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    graph = trace(model, *rows(4))
    assert "inner._orig_mod.0" in {node.target for node in graph.graph.nodes}


def test_other_threads_are_not_recorded():
    seen: SimpleQueue[torch.Tensor] = SimpleQueue()  # what a recording adds to a list is taken back

    def body(m, x):
        thread = threading.Thread(target=lambda: seen.put(nn.Linear(2, 2)(torch.ones(1, 2))))
        thread.start()
        thread.join()
        return m.a(x)

    assert len([n for n in trace(Body(body), *rows(2)).graph.nodes if n.op.startswith("call_")]) == 1
    assert type(seen.get()) is torch.Tensor


def test_everything_is_put_back_even_after_a_failure():
    before = nn.Module.__call__, torch.autograd.Function.__dict__["apply"], torch.SymInt.__hash__, len
    with pytest.raises(TraceError):
        trace(Body(lambda m, x: m.missing(x)), *rows(2))
    assert before == (nn.Module.__call__, torch.autograd.Function.__dict__["apply"], torch.SymInt.__hash__, len)


class Rounded(nn.Module):
    """What autograd saves is rounded: the gradients are others without the hooks."""

    def __init__(self, *, is_root: bool) -> None:
        super().__init__()
        self.is_root = is_root
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity() if is_root else Rounded(is_root=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.is_root:
            with torch.autograd.graph.saved_tensors_hooks(torch.round, lambda saved: saved):
                h = h.exp().tanh()
        return self.c(self.b(h))


@pytest.mark.parametrize("is_root", [True, False], ids=["a statement", "a submodule"])
def test_code_that_passes_saved_tensors_through_hooks_is_kept_whole(is_root: bool) -> None:
    model = Rounded(is_root=is_root)
    eager, x = copy.deepcopy(model), torch.randn(6, 4)
    pipe = pc.compile(
        model, 2, n_microbatches=2, cost="analytic", devices=["cpu"] * 2, loss_fn=lambda y: y.square().mean()
    )
    pipe.step(x)
    for part in x.chunk(2):
        (eager(part).square().mean() / 2).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


class HooksNode(nn.Module):
    """Doubles a gradient by a hook on the node of autograd that makes a value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        h.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
        return h.relu()


@pytest.mark.parametrize("model", [HooksNode(), nn.Sequential(nn.Linear(4, 4), HooksNode(), nn.Linear(4, 2))])
def test_a_hook_on_a_node_of_autograd_is_refused(model: nn.Module) -> None:
    with pytest.raises(TraceError, match="a hook on a node of autograd") as raised:
        trace(model, torch.randn(4, 4))
    assert "x.register_hook" in str(raised.value)
