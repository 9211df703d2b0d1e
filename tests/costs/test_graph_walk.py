"""The walk over a graph that all cost models share."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, symbolic_trace

import pipecompile as pc
from pipecompile.costs.graph_walk import FakeTwins, OneDevice, Visit, walk
from pipecompile.costs.node_cost import CostError
from pipecompile.costs.node_run import NodeRun
from pipecompile.errors import InputError
from pipecompile.tracing.node_facts import note


def blank_first(x: Tensor) -> None:
    x[:, 0] = 0


fx.wrap("blank_first")


def look(run: NodeRun) -> object:
    run.first()
    return run.value


def visits(model: nn.Module, *inputs: object) -> dict[str, Visit[object]]:
    return walk(symbolic_trace(model), inputs, look)


def test_every_compute_node_is_visited_and_computes_what_the_model_does(unet: nn.Module) -> None:
    unet.eval()
    graph, x = symbolic_trace(unet), torch.randn(2, 3, 16, 16)
    seen = walk(graph, [x], look)
    assert list(seen) == [node.name for node in graph.graph.nodes if node.op.startswith("call_")]
    assert torch.equal(seen["head"].reading, unet(x)["logits"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(8, 4), 5 * 8 * 4),  # its input; the weight is a parameter
        (nn.Tanh(), 5 * 8 * 4),  # its result
        (nn.Dropout(0.5), 5 * 8 * 4),  # the scaled mask
        (nn.Flatten(0), 0),  # a view
        (nn.BatchNorm1d(8), 5 * 8 * 4 + 2 * 8 * 4),  # its input, the batch's mean and deviation
        (nn.Linear(8, 4).requires_grad_(False), 0),  # no gradient for the weight: the input is not needed
    ],
)
def test_saved_bytes_of_known_layers(layer: nn.Module, expected: int) -> None:
    seen = visits(nn.Sequential(nn.Identity(), layer), torch.randn(5, 8, requires_grad=True))
    assert seen["_1"].saved_bytes == expected


def test_a_storage_is_counted_at_the_first_node_that_saves_it() -> None:
    seen = visits(nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(5, 8, requires_grad=True))
    assert [visit.saved_bytes for visit in seen.values()] == [
        160,
        0,
        160,
    ]  # tanh: its result, which _1 saves as its input


def test_in_place_nodes_save_the_storage_they_write() -> None:
    seen = visits(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), torch.randn(5, 8))
    assert [visit.saved_bytes for visit in seen.values()] == [160, 160, 0]


def test_output_bytes_are_what_the_tensors_of_the_result_hold() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, _ = x.max(dim=1)
            blank_first(x)
            return values + x.size(0) + x.t().sum()

    seen = {name: visit.output_bytes for name, visit in visits(Model(), torch.randn(5, 8)).items()}
    assert seen["max_1"] == 5 * 4 + 5 * 8
    assert (seen["getitem"], seen["blank_first"], seen["size"], seen["t"]) == (20, 0, 0, 160)


def test_inputs_are_not_written_to() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    x = torch.zeros(3)
    seen = visits(Model(), x)
    assert torch.equal(seen["add_"].reading, torch.ones(3))  # type: ignore[arg-type]
    assert torch.equal(x, torch.zeros(3))


def test_values_go_when_their_last_user_has_run() -> None:
    alive: list[list[bool]] = []
    references: list[weakref.ref[Tensor]] = []

    def watch(run: NodeRun) -> None:
        gc.collect()
        alive.append([reference() is not None for reference in references])
        run.first()
        references.append(weakref.ref(run.value))

    walk(symbolic_trace(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))), [torch.randn(2, 4)], watch)
    assert alive == [[], [True], [False, True], [False, False, True]]


def test_a_failing_node_is_named_with_the_users_line() -> None:
    graph = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)))
    note(next(node for node in graph.graph.nodes if node.name == "_1"), source="net.py:12 in forward")
    with pytest.raises(CostError, match=r"node _1 \(call_module 1\) failed: RuntimeError: .*mat1 and mat2") as caught:
        walk(graph, [torch.randn(2, 4)], look)
    assert caught.value.where == "net.py:12 in forward"
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("inputs", [[], [torch.ones(1), 2]])
def test_inputs_must_fit_the_placeholders(inputs: list[object]) -> None:
    graph: GraphModule = symbolic_trace(nn.Identity())
    with pytest.raises(InputError, match=rf"1 placeholders \(input_1\), {len(inputs)} values"):
        walk(graph, inputs, look)


CPU = torch.device("cpu")


@pytest.mark.parametrize("home", ["cpu", "meta"])
def test_every_tensor_of_a_model_gets_one_twin(home: str) -> None:
    with torch.device(home):
        model = nn.ModuleDict(
            {"lstm": nn.LSTM(4, 4), "norm": nn.BatchNorm1d(4), "one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
        )
        model["two"].weight = model["one"].weight
        model["norm"].constant = torch.ones(2, 2).t()
    with FakeTensorMode():
        FakeTwins(CPU).replace_in(model)
    tensors = [*model.parameters(), *model.buffers(), model["norm"].constant]
    assert all(isinstance(tensor, FakeTensor) and tensor.device == CPU for tensor in tensors)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert model["two"].weight is model["one"].weight
    lstm: Any = model["lstm"]
    assert all(
        flat is lstm.get_parameter(name)
        for flat, name in zip(lstm._flat_weights, lstm._flat_weights_names, strict=True)
    )
    assert model["norm"].constant.stride() == (1, 2)


def test_twins_keep_whether_a_gradient_is_wanted() -> None:
    with FakeTensorMode():
        twins = FakeTwins(CPU)
        wanted = [twins.of(tensor).requires_grad for tensor in (torch.ones(1), torch.ones(1, requires_grad=True))]
        frozen = twins.of(nn.Parameter(torch.ones(1), requires_grad=False))
    assert (wanted, frozen.requires_grad) == ([False, True], False)


def test_calls_that_name_a_device_get_the_common_one() -> None:
    with OneDevice(CPU):
        made = [
            torch.zeros(2, device="meta"),
            torch.ones(2).to("meta"),
            torch.ones(2).to(torch.device("meta"), torch.float64),
            torch.ones(2).to(device="meta"),
            torch.ones(2).cuda(),
        ]
        typed = torch.ones(2).to(torch.int8)
    assert {tensor.device for tensor in made} == {CPU}
    assert (made[2].dtype, typed.dtype) == (torch.float64, torch.int8)


def test_a_write_by_a_mask_costs_a_pass_over_the_tensor_and_has_both_gradients() -> None:
    with FakeTensorMode(), OneDevice(CPU):
        h, value = torch.zeros(4, 3, requires_grad=True).clone(), torch.ones((), requires_grad=True)
        for index in (h > 0, (slice(None), torch.ones(3, dtype=torch.bool))):
            h[index] = value
        h[torch.ones(4, dtype=torch.bool)] = 2.0
        assert all(gradient is not None for gradient in torch.autograd.grad(h.sum(), [value]))
        for dtype in (torch.bool, torch.int64, torch.uint8):
            written = torch.zeros(4, dtype=dtype)
            written[torch.ones(4, dtype=torch.bool)] = torch.ones(4)
            assert written.dtype == dtype
        h.detach()[h > 0] = torch.ones(2, dtype=torch.float64)
        assert h.shape == (4, 3)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_buffer_costs_as_a_dense_one() -> None:
    """A buffer in CSR layout raised RuntimeError: it has no strides."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("adjacency", torch.eye(4).to_sparse_csr())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.adjacency @ self.a(x).T).T

    model, x = Mix(), torch.randn(4, 4)
    pipe = pc.compile(model, 1, devices=["cpu"], n_microbatches=2, cost="analytic")
    assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
