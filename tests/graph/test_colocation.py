from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipecompile.graph.colocation import compute_nodes, compute_ties, note_ties, ties_with_copies
from pipecompile.tracing import trace
from tests.support.cuts import run_stages


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.relu = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
        )
        self.register_buffer("mean", torch.zeros(4))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def ties(body, *, training: bool = True):
    found = compute_ties(trace(Body(body).train(training), torch.randn(3, 4)))
    return [" ".join(group) for group in found.groups], list(found.precedence)


def test_nothing_is_tied_without_a_reason():
    assert ties(lambda m, x: m.b(m.a(x).relu()) + m.a(x).view(2, -1).reshape(-1, 4)) == ([], [])


def test_a_relu_in_place_stays_with_what_it_overwrites():
    assert ties(lambda m, x: m.b(m.relu(m.norm(m.a(x))))) == (["norm relu"], [])


def test_who_reads_before_a_write_is_not_later_than_the_writer():
    def body(m, x):
        h = m.norm(x)
        k = m.a(h)
        h += x
        return m.b(h) + k

    assert ties(body) == (["norm add"], [("a", "add")])


def test_views_share_the_memory_of_their_base():
    def body(m, x):
        h = m.a(x)
        view = h[:, :2]
        other = h.view(2, -1)
        view.zero_()
        return other.sum() + m.b(x)

    assert ties(body) == (["a getitem view zero"], [])


def test_one_after_another_write():
    def body(m, x):
        h = m.a(x)
        h[:, 0] = 0
        k = m.b(h)
        return h.mul_(2) + k

    assert ties(body) == (["a setitem mul"], [("b", "mul")])


def test_a_module_with_buffers_used_twice_is_in_one_stage_and_one_without_is_not():
    assert ties(lambda m, x: m.norm(m.a(m.norm(x)))) == (["norm norm_1"], [])
    assert ties(lambda m, x: m.norm(m.a(m.norm(x))), training=False) == (["norm norm_1"], [])
    assert ties(lambda m, x: m.a(m.b(m.a(x)))) == ([], [])


def test_readers_of_a_written_buffer_stay_with_the_writer_even_after_it():
    def body(m, x):
        before = x - m.mean
        m.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        view = m.mean[None]
        h = m.a(before)
        return m.b(h) + view

    assert ties(body) == (["sub mul add getitem add_1"], [])


def test_statistics_that_torch_writes_without_saying_so():
    def body(m, x):
        y = F.batch_norm(m.a(x), m.mean, m.norm.running_var, training=m.training)
        return m.b(y) + m.mean + m.norm(x)

    assert ties(body) == (["batch_norm add norm"], [])
    assert ties(body, training=False) == ([], [])


def test_an_input_that_is_written_has_all_its_readers_in_one_stage():
    def body(m, x):
        h = m.a(x)
        x[:, 0] = 0
        return m.b(h) + x

    assert ties(body) == (["a setitem add"], [])


def test_items_stay_with_their_tuple():
    groups, _ = ties(lambda m, x: m.a(x).chunk(2, 1)[0] + m.b(x).max(1, keepdim=True)[0])
    assert groups == ["chunk getitem", "max_1 getitem_2"]
    groups, precedence = ties(lambda m, x: m.b(torch.cat(m.a(x).chunk(2, 1)[::-1], 1)))
    assert groups == ["chunk getitem getitem_1"]
    assert precedence == []


def test_the_way_of_a_gradient_is_not_cut():
    def body(m, x):
        h = m.a(x)
        (force,) = torch.autograd.grad(m.b(h).relu().sum(), h, create_graph=True)
        return m.b(force)

    assert ties(body) == (["a b relu sum_1 grad getitem"], [])


def test_hooks_stay_with_their_tensor():
    def body(m, x):
        h = m.a(x)
        h.register_hook(lambda gradient: gradient)
        return m.b(h)

    assert ties(body) == (["a register_hook"], [])


def with_copies(body):
    found, copied = ties_with_copies(trace(Body(body), torch.randn(3, 4)))
    groups = [" ".join(group) for group in found.groups if len(group) > 1]
    return groups, list(found.precedence), list(copied)


def keeps_a_gradient(self: Body, x: torch.Tensor) -> torch.Tensor:
    hidden = self.a(x)
    hidden.retain_grad()
    self.hidden = hidden
    return self.b(hidden)


def test_a_tensor_whose_gradient_is_kept_is_left_by_the_stage_that_makes_it():
    (group,) = compute_ties(trace(Body(keeps_a_gradient), torch.randn(2, 4))).groups
    assert group == ("a", "retain_grad", "keep")


def leaves_a_loss(self: Body, x: torch.Tensor) -> torch.Tensor:
    hidden = self.a(x)
    self.aux = hidden.square()
    return self.b(hidden)


def test_a_tensor_that_is_left_on_the_model_is_left_by_the_stage_that_makes_it():
    (group,) = compute_ties(trace(Body(leaves_a_loss), torch.randn(2, 4))).groups
    assert group == ("a", "square", "keep")


def keeps_and_writes(self: Body, x: torch.Tensor) -> torch.Tensor:
    hidden = self.a(x)
    hidden.retain_grad()
    self.hidden = hidden.mul_(2)
    return self.b(hidden)


def test_a_tensor_whose_gradient_is_kept_is_left_by_the_stage_that_makes_it_after_a_write_too():
    (group,) = compute_ties(trace(Body(keeps_and_writes), torch.randn(2, 4))).groups
    assert group == ("a", "retain_grad", "mul", "keep")


def test_a_copy_separates_an_operation_from_what_it_overwrites():
    assert with_copies(lambda m, x: m.b(m.relu(m.norm(m.a(x))))) == ([], [], [("norm", "relu")])


def test_copies_cut_a_stream_that_every_layer_adds_to():
    def body(m, x):
        h = m.norm(x)
        h += m.a(h)
        h += m.b(h)
        return h * 2

    pairs = [("a", "add"), ("b", "add_1")]
    assert with_copies(body) == ([], pairs, [("norm", "add"), ("add", "add_1")])


def test_who_uses_a_tensor_after_it_was_written_stays_with_the_writer():
    def body(m, x):
        h = m.a(x)
        before = m.b(h)
        h[:, 0] = 0
        return m.b(h) + before

    assert with_copies(body) == (["setitem b_1"], [("b", "setitem")], [("a", "setitem")])


def test_no_copy_stands_for_two_views_of_one_memory_nor_for_an_output():
    def views(m, x):
        h = m.a(x)
        view, other = h[:, :2], h.view(2, -1)
        view.zero_()
        return other.sum() + m.b(x)

    def output(m, x):
        h = m.a(x)
        h[:, 0] = 0
        return h

    def mean(m, x):
        before = x - m.mean
        m.mean.mul_(0.9)
        return m.a(before)

    assert with_copies(views) == (["a getitem view zero"], [], [])
    assert with_copies(output) == (["a setitem"], [], [])
    assert with_copies(mean) == (["sub mul"], [], [])


# -- random models ----------------------------------------------------------------------------------------------------


class Writes(nn.Module):
    """A few random operations on random values: layers, views, and writes in place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.relu = seed, nn.ReLU(inplace=True)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        draw, values = random.Random(self.seed), [self.layers[0](x)]
        for _ in range(draw.randint(3, 9)):
            a, b = draw.choice(values), draw.choice(values)
            if draw.random() < 0.5:
                values.append(self.made(draw, a, b))
            else:
                self.write(draw, a, b)
        return tuple(draw.choice(values) for _ in range(draw.randint(1, 3)))

    def made(self, draw: random.Random, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a value, some of them in the memory of `a`."""
        layer = draw.choice(list(self.layers))
        makers = [
            lambda: layer(a),
            a.relu,
            lambda: self.relu(a),
            lambda: a.add_(b),
            lambda: a.view(-1, 4),
            lambda: a[:, :],
        ]
        return draw.choice(makers)()

    @staticmethod
    def write(draw: random.Random, a: torch.Tensor, b: torch.Tensor) -> None:
        """Write into the memory of `a`."""
        writers = [
            lambda: a.mul_(0.5), lambda: a.__setitem__((slice(None), 0), 1.0), lambda: a.add_(b.detach()), lambda: a[:, :2].zero_()
        ]  # fmt: skip
        draw.choice(writers)()


def legal(graph: torch.fx.GraphModule, stage_of: dict[str, int]) -> dict[str, int]:
    """Raise the stages until they are legal with copies."""
    ties, _ = ties_with_copies(graph)
    reads = [(source.name, node.name) for node in compute_nodes(graph) for source in node.all_input_nodes]
    while True:
        before = dict(stage_of)
        for a, b in (*reads, *ties.precedence):
            stage_of[b] = max(stage_of.get(a, 0), stage_of[b])
        for group in ties.groups:
            stage_of.update(dict.fromkeys(group, max(stage_of[name] for name in group)))
        if stage_of == before:
            return stage_of


@pytest.mark.parametrize("seed", range(24))
def test_every_cut_with_copies_computes_what_the_model_does(seed: int) -> None:
    """Stages hand on values as they are, in the memory of the stage before."""
    torch.manual_seed(seed)
    model, x = Writes(seed), torch.randn(3, 4)
    expected = model(x)
    graph, draw = note_ties(trace(model, x)), random.Random(seed)
    for n_stages in (2, 3, 4):
        stage_of = legal(graph, {node.name: draw.randrange(n_stages) for node in compute_nodes(graph)})
        outputs = run_stages(graph, stage_of, 3, x)
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
