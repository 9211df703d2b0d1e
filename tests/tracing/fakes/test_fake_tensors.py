"""Fake twins of tensors, and calls whose numbers only a run knows."""

from __future__ import annotations

from queue import SimpleQueue

import torch
from bodies import Body, rows
from torch import nn

import pipecompile as pc
from pipecompile.tracing import trace
from pipecompile.tracing.node_facts import value_of


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.constant = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.a(x)).to(self.b.weight.device)
        return self.b(h) + self.constant.to(x.device) + torch.zeros(4) + torch.arange(4, device=x.device)


def devices(graph) -> set[str]:
    values = [value_of(node) for node in graph.graph.nodes]
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def test_parameters_on_several_devices_are_recorded_on_the_first_ones():
    names = [node.name for node in trace(Spread(), torch.randn(3, 4)).graph.nodes]
    for first, second in (("cpu", "meta"), ("meta", "cpu")):
        model = Spread()
        model.a.to_empty(device=first)
        model.norm.to_empty(device=second)
        model.b.weight = model.a.weight
        graph = trace(model, torch.randn(3, 4))
        assert devices(graph) == {first}
        assert graph.facts.device.type == first
        assert [node.name for node in graph.graph.nodes] == names
        assert model.norm.weight.device.type == second
        assert model.b.weight is model.a.weight


def test_inputs_decide_where_there_are_no_parameters():
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros(4)

    assert devices(trace(Plain(), torch.randn(3, 4, device="meta"))) == {"meta"}


def test_a_model_on_meta_takes_inputs_from_the_cpu():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert devices(trace(model, torch.randn(3, 4))) == {"meta"}


def test_twins_are_parameters_and_tied_ones_are_one():
    seen: SimpleQueue[list[bool]] = SimpleQueue()  # what a recording adds to a list is taken back

    class Looks(Spread):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.put(
                [
                    type(self.a.weight) is nn.Parameter,
                    isinstance(self.a.weight, nn.Parameter),
                    self.a.weight is self.b.weight,
                ]
            )
            return super().forward(x)

    trace(Looks(), torch.randn(3, 4))
    assert seen.get() == [True, True, True]


def test_inputs_keep_their_memory_format_and_their_wish_for_a_gradient():
    seen: SimpleQueue[list[bool]] = SimpleQueue()  # what a recording adds to a list is taken back

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.put([x.is_contiguous(memory_format=torch.channels_last), x.requires_grad, y.requires_grad])
            return x

    trace(Looks(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(2, requires_grad=True))
    assert seen.get() == [True, False, True]


def made_of_numbers(m, x):
    n = x.shape[0]
    sizes = torch.tensor([n, x.shape[1]], dtype=torch.float32, device=x.device)
    nested = torch.tensor([[x.mean(), 2.0], [x.sum().long(), 4]])
    kinds = x.new_tensor([x.max(), 1]), torch.as_tensor([n / 2, 1.0]), torch.tensor([n, 2]), torch.tensor(float(n))
    assert [kind.dtype for kind in kinds] == [torch.float32, torch.float32, torch.int64, torch.float32]
    return m.a(x) * sizes.sum() + nested.sum() + sum(kind.sum() for kind in kinds)


def test_tensors_of_numbers_that_only_a_run_knows(agrees):
    graph = agrees(Body(made_of_numbers), rows(4))
    assert not graph.facts.guards


def test_their_cost_can_be_computed():
    model, (x,) = Body(made_of_numbers), rows(4)(4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=1, cost="analytic", partitioner="dp")
    assert torch.equal(pipe(x), model(x))


def test_draws_of_as_many_samples_from_a_generator():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.source = nn.Linear(4, 4), nn.Linear(4, 4), torch.Generator().manual_seed(3)

        def forward(self, x):
            h = self.a(x) + torch.randn(x.shape, generator=self.source) + torch.rand(size=x.shape, generator=None)
            return self.b(h[torch.randperm(len(h), generator=self.source)])

    outputs = []
    for piped in (False, True):
        torch.manual_seed(0)
        model, x = Noisy(), torch.randn(6, 4)
        run = pc.compile(model, 2, example_args=(x,), n_microbatches=2, cost="analytic") if piped else model
        torch.manual_seed(1)
        with torch.no_grad():
            outputs.append(run(x) if piped else torch.cat([run(part) for part in x.split(3)]))
        outputs.append(model.source.get_state())
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def test_the_contents_of_parameters_may_be_swapped_after_a_recording():
    model = Spread()
    graph = trace(model, torch.randn(3, 4))
    torch.utils.swap_tensors(model.a.bias, nn.Parameter(torch.ones(4)))
    assert torch.equal(graph.get_parameter("a.bias"), torch.ones(4))


def test_filling_a_diagonal_fixes_no_size() -> None:
    def masked(x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, x])
        return (both @ both.T).fill_diagonal_(-1.0)

    class Similarity(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return masked(x)

    graph, x = trace(Similarity(), torch.randn(3, 4)), torch.randn(5, 4)
    assert graph.facts.guards == ()
    assert torch.equal(graph(x), masked(x))


def test_rows_of_one_selection_are_written_into_those_of_another_for_any_number_of_rows():
    def body(m, x, mask):
        first, second = mask.nonzero(as_tuple=True)
        chosen = m.a(x)[mask]
        before = m.c(x)[first, second - 1]
        chosen = m.b(chosen)
        chosen[:, :2] = before[:, :2]
        return chosen.pow(2).mean()

    def inputs(size):
        return torch.randn(size, 5, 4), (torch.arange(5) > 1).expand(size, 5)

    model = Body(body)
    pipe = pc.compile(model, 2, example_args=inputs(4), n_microbatches=2, loss_fn=lambda y: y, cost="analytic")
    assert all(reason.piece.block is None for reason in pipe.graph.facts.kept)  # the assignment is a node
    for size in (4, 8):
        x, mask = inputs(size)
        parts = zip(x.chunk(2), mask.chunk(2), strict=True)
        torch.testing.assert_close(pipe.step(x, mask), (sum(model(*one) for one in parts) / 2).detach())


class Crops(nn.Module):
    """Runs its inputs in groups of equal length, whose ends Python reads from a tensor, and cuts the result at others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        crops, start, results = [x, y, z], 0, []
        lengths = torch.tensor([crop.shape[1] for crop in crops])
        for end in torch.unique_consecutive(lengths, return_counts=True)[1].cumsum(0):
            results.append(self.a(torch.cat(crops[start:end])).mean(1))
            start = end
        widths = torch.as_tensor([(1, 2), (2, 1)])
        return self.b(torch.cat(torch.cat(results).split([r * c for r, c in widths], 1)[::-1], 1))


def test_python_reads_small_tensors_of_its_own_numbers():
    sizes = (3, 3, 2)
    model, crops = Crops(), [torch.randn(2, size, 4) for size in sizes]
    assert not pc.explain(model, *crops).kept_whole
    pipe = pc.compile(model, 2, example_args=crops, n_microbatches=1, cost="analytic", partitioner="dp")
    assert torch.equal(pipe(*crops), model(*crops))
