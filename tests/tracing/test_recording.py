"""A recording is the run of the model as nodes; its batch size and grad mode, and a second size, are chosen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipecompile.batching.call_inputs import flatten
from pipecompile.errors import InputError
from pipecompile.tracing import trace
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.recording import another_size, record
from tests.support.bodies import Body


def test_a_single_sample_is_recorded_for_any_size() -> None:
    graph = trace(Body(lambda _, x: x * 2), torch.randn(1, 4))
    assert graph.facts.batch_size is None
    assert graph(torch.randn(5, 4)).shape == (5, 4)


def test_a_branch_on_the_single_sample_is_recorded_for_it_alone() -> None:
    graph = trace(Body(lambda _, x: x * 2 if x.shape[0] == 1 else x), torch.randn(1, 4))
    assert graph.facts.batch_size == 1


@pytest.mark.parametrize("around", [True, False])
def test_the_grad_mode_counts_only_if_the_model_reads_it(around: bool) -> None:
    x = torch.randn(3, 4)
    with torch.set_grad_enabled(around):
        reads = trace(Body(lambda _, x: x * 2 if torch.is_grad_enabled() else x), x)
        ignores = trace(Body(lambda _, x: x * 2), x)
    assert reads.facts.grad_mode is around
    assert ("mul" in str(reads)) is around
    assert ignores.facts.grad_mode is None


def test_another_size_is_recorded_only_for_a_graph_of_a_single_size() -> None:
    model = Body(lambda _, x: torch.cat([row * 2 for row in x], 0) if x.shape[0] == 3 or x.shape[0] == 4 else x)
    inputs = flatten(model.forward, (torch.randn(3, 4),), {}, None)
    graph = record(model, inputs)
    assert graph.facts.batch_size == 3
    other = another_size(model, graph, inputs)
    assert other is not None
    assert other.facts.batch_size == 4
    free = record(Body(lambda _, x: x * 2), inputs)
    assert another_size(model, free, inputs) is None


def test_a_model_whose_forward_has_batch_dims_gets_them() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor, batch_dims: dict[str, int] | None = None) -> torch.Tensor:
            return x * len(batch_dims or ())

    graph = trace(Own(), torch.randn(3, 4), batch_dims={"x": 1, "y": 2})
    assert graph.facts.dims[0] == 0
    assert "mul(x, 2)" in str(graph)


def test_batch_dims_of_no_parameter_are_refused() -> None:
    with pytest.raises(InputError, match="batch_dims"):
        trace(nn.Linear(4, 4), torch.randn(3, 4), batch_dims={"nothing": 0})


def test_threads_that_record_at_the_same_time_wait_for_each_other() -> None:
    x, errors = torch.randn(4, 4), []

    def record_often() -> None:
        try:
            for _ in range(4):
                trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x)
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=record_often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


class Pair(NamedTuple):
    x: Any
    y: Any


class ThreeLayers(nn.Module):
    """Three linear layers of width 4, and what the test does with them."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.constant = torch.arange(4.0)
        self.norm = nn.BatchNorm1d(4)
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def rows(*shape: int) -> Callable[[int], tuple[torch.Tensor]]:
    return lambda size: (torch.randn(size, *shape, generator=torch.Generator().manual_seed(size)),)


def branches_on_shape(m, x):
    assert isinstance(x, torch.Tensor)
    h = m.a(x) if x.shape[-1] == 4 and x.dim() == 2 else m.b(x)
    return h * len(x) if len(h.shape) == 2 else h


def in_place(m, x):
    h = m.a(x)
    h[:, 0] = 0
    h[:, 1:] += m.b(x)[:, 1:]
    h.mul_(2).clamp_(min=-1)
    return m.c(h)


def views(m, x):
    h = m.a(x).clone()
    v, w = h[:, :2], h.view(-1, 2, 2)
    v.add_(1)
    h.t()[0].zero_()
    return m.b(h).sum(1) + w.sum((1, 2))


def factories(m, x):
    size = x.shape[0]
    grown = torch.zeros(size, 4, device=x.device) + torch.arange(size)[:, None] + torch.full((size, 1), 2.0)
    return m.a(x) + grown + x.new_ones(4) + torch.zeros_like(x) + torch.eye(4).sum(0) + torch.as_tensor([1.0, 2, 3, 4])


def out_argument(m, x):
    made = torch.empty_like(x)
    torch.mul(x, 2, out=made)
    return m.a(made)


def buffers(m, x):
    m.mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
    return m.a(x) - m.mean


def constants(m, x):
    m.constant += 1  # of the graph's model and of the twin alike
    return m.a(x) * m.constant + 0.5


def gradient_inside(m, x):
    h = x.clone()
    h.requires_grad = True
    (force,) = torch.autograd.grad((m.a(h) ** 2).sum(), h, create_graph=True)
    return m.b(force)


def tied(m, x):
    return m.b(m.a(x)) + F.linear(x, m.a.weight) + m.a(m.c(x))


def normalised(m, x):
    return F.batch_norm(m.norm(m.norm(m.a(x))), m.mean, m.mean + 1, training=False)


def hooks_on_values(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient * 3)
    return m.b(h)


BODIES = [
    branches_on_shape, in_place, views, factories, out_argument, buffers, constants, gradient_inside, tied, hooks_on_values, normalised,
    lambda m, x: m.a(x) + x.shape[0] * 7 // 2 + x.size(0) ** 0.5 - -len(x) % 3,
    lambda m, x: 1 - m.a(x) ** 2 + 2 ** m.b(x) / (3 + m.c(x).abs()),
    lambda m, x: torch.einsum("bi,ij->bj", x, m.a.weight) @ m.b.weight.T,
    lambda m, x: F.dropout(m.a(x), 0.5, m.training) + torch.rand_like(x),
    lambda m, x: F.linear(x, m.a.weight, m.mean),
    lambda m, x: torch.view_as_complex(m.a(x).reshape(-1, 2, 2).contiguous()).abs(),
    lambda m, x: m.b(m.a(x).data.mul_(2) + m.c(x)),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("training", [True, False])
def test_the_graph_does_what_the_model_does_at_any_batch_size(agrees, body, training):
    sizes = (2, 3, 5) if body is normalised else (1, 3, 5)  # BatchNorm cannot train on one sample
    graph = agrees(ThreeLayers(body).train(training), rows(4), sizes=sizes)
    assert not graph.facts.guards


def unpacked(m, x):
    first, *rest = x.unbind(1)
    middle = x.chunk(3, 1)[1].split(1, 1)
    return (
        m.a(first)
        + sum(m.b(t) for t in rest)
        + middle[0][:, 0]
        + torch.stack(list(x.transpose(0, 1))).sum(0)
        + len(rest)
    )


def attention(m, x):
    return m.a(F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True))


@pytest.mark.parametrize("body", [unpacked, attention])
def test_sequences(agrees, body):
    agrees(ThreeLayers(body), rows(6, 4))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.cell = nn.LSTM(8, 8, 2, batch_first=True), nn.GRUCell(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, c) = self.rnn(x)
        y, _ = self.attention(y, y, y)
        y = self.transformer(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5))
        return y + self.cell(h[0], c[0])[:, None]


def test_torch_layers_are_leaves_and_torch_containers_are_not(agrees):
    graph = agrees(Layers(), rows(5, 8))
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    assert {
        "rnn",
        "cell",
        "attention",
        "transformer.encoder.layers.0.self_attn",
        "transformer.decoder.layers.0.linear1",
    } <= called
    assert "transformer" not in called


def nested(m, pair, *rest, scale=1, none=None):
    assert none is None
    return Pair(m.a(pair.x["k"]), OrderedDict(z=m.b(pair.y) * scale, w=[m.c(rest[0][0]), rest[0][1], None]))


def test_nested_inputs_and_outputs(agrees):
    agrees(
        ThreeLayers(nested),
        lambda size: (Pair({"k": torch.ones(size, 4)}, torch.ones(size, 4)), [torch.ones(size, 4), 5]),
    )


def test_keyword_arguments_and_none():
    model = ThreeLayers(lambda m, x, mask=None, scale=1.0: m.a(x) * scale + (0 if mask is None else mask))
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    for kwargs in ({"mask": mask, "scale": 2.0}, {"mask": None}, {}):
        graph = trace(model, x, **kwargs)
        assert torch.equal(graph(x, **kwargs), model(x, **kwargs))


def test_an_output_may_be_an_input_a_parameter_or_a_size(agrees):
    agrees(ThreeLayers(lambda m, x: (x, m.a.weight, m.a(x), x.shape[0], x.shape[0] // 2, "text", None)), rows(4))


def test_parameters_and_modules_of_the_graph_are_the_models_own():
    model = ThreeLayers(tied)
    graph = trace(model, torch.randn(2, 4))
    assert graph.get_submodule("a") is model.a
    assert graph.get_parameter("a.weight") is model.a.weight


def test_every_node_knows_where_it_comes_from():
    graph = trace(nn.Sequential(nn.Sequential(ThreeLayers(in_place), nn.ReLU(inplace=True))), torch.randn(2, 4))
    nodes = {node.name: node for node in graph.graph.nodes if node.op.startswith("call_")}
    assert facts(nodes["_0_0_setitem"]).module == "0.0"
    assert "test_recording.py:" in facts(nodes["_0_0_mul"]).source
    assert facts(nodes["_0_1"]).mutates == facts(nodes["_0_0_c"]).storages == facts(nodes["_0_1"]).storages
    assert facts(nodes["_0_0_b"]).mutates == frozenset()


def test_a_leaf_module_that_writes_its_buffers_says_so():
    model = nn.Sequential(nn.BatchNorm1d(4))
    assert len(facts(_node(trace(model, torch.randn(3, 4)), "_0")).mutates) == 3
    assert not facts(_node(trace(model.eval(), torch.randn(3, 4)), "_0")).mutates


def _node(graph, name):
    return next(node for node in graph.graph.nodes if node.name == name)


def test_modules_and_parameters_in_plain_lists_are_used_themselves(agrees):
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale, self.head = [nn.Linear(4, 4)], [nn.Parameter(torch.ones(4))], nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[0](x) * self.scale[0])

    model = Hidden()
    graph = agrees(model, rows(4))
    assert any(node.op == "get_attr" and getattr(graph, node.target) is model.scale[0] for node in graph.graph.nodes)
