"""A traced graph is an ordinary GraphModule, and its text reads back as an equal graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from pipecompile.graph.colocation import note_ties
from pipecompile.tracing import trace
from pipecompile.tracing.emit.call_description import graph_path
from pipecompile.tracing.graph_parser import parse_graph
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.verifiers.traced_graph import verify_graph
from tests.support.models import ZOO


class Everything(nn.Module):
    """Branches, modes, sizes, items of tuples, constants, random numbers and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = float("inf")) -> dict[str, Any]:
        n = x.shape[0]
        if n % 2 == 0 and n > 3:
            x = x * 2
        with torch.no_grad():
            y = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.b(x)
        _, index = torch.max(z, dim=1)
        z = torch.dropout(z, 0.5, True)
        return {
            "y": y + torch.zeros(n, 4),
            "n": n * 3,
            "m": [index, n / 2, y.mT.clamp(-scale)],
            "z": z[:, 1:3].to("cpu"),
        }


class Router(nn.Module):
    """A piece that decides on a value, so that it is one opaque node."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight(x * 2 if float(x.sum()) > 1e9 else x)


def reads_back(graph: TracedGraph) -> TracedGraph:
    text = str(graph)
    parsed = parse_graph(text)
    assert str(parsed).splitlines() == text.splitlines()
    assert parsed == graph
    verify_graph(parsed)
    return parsed


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ZOO)
def test_the_text_of_an_image_model_reads_back(name: str) -> None:
    make, size = ZOO[name]
    reads_back(note_ties(trace(make(), torch.randn(2, 3, size, size))))


def test_the_text_of_modes_sizes_items_and_outputs_reads_back() -> None:
    graph = trace(Everything(), torch.randn(6, 4))
    assert graph.facts.guards
    reads_back(graph)
    reads_back(note_ties(graph))


def test_the_text_of_an_opaque_piece_reads_back() -> None:
    parsed = reads_back(note_ties(trace(nn.Sequential(Router(), nn.Linear(4, 4)), torch.randn(6, 4))))
    (reason,) = parsed.facts.kept
    assert (reason.piece.path, reason.fault.code, reason.fault.function) == ("0", "PC102", "Router.forward")


def test_the_text_of_gpt2_reads_back() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    ids = torch.randint(0, 64, (4, 8))
    reads_back(note_ties(trace(transformers.GPT2LMHeadModel(config), input_ids=ids, labels=ids)))


def test_the_text_of_t5_reads_back() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    ids = torch.randint(0, 64, (4, 8))
    reads_back(note_ties(trace(transformers.T5ForConditionalGeneration(config), input_ids=ids, labels=ids)))


def test_it_is_an_ordinary_graph_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graph, x = trace(model, torch.randn(3, 4)), torch.randn(5, 4)
    assert isinstance(graph, fx.GraphModule)
    assert type(graph).__name__ == "Sequential"
    assert torch.equal(graph(x), model(x))
    assert "def forward" in graph.code
    assert len({graph, graph}) == 1
    assert graph.get_submodule("0") is model[0]


def test_a_deep_copy_keeps_the_facts_and_runs() -> None:
    graph, x = trace(nn.Linear(4, 4), torch.randn(3, 4)), torch.randn(5, 4)
    twin = copy.deepcopy(graph)
    assert isinstance(twin, TracedGraph)
    assert twin.facts.names == graph.facts.names
    assert torch.equal(twin(x), graph(x))


def test_graphs_are_equal_when_all_but_the_values_of_parameters_is() -> None:
    models = (
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.GELU()),
    )
    one, twin, other = (trace(model, torch.randn(3, 4)) for model in models)
    assert one == twin
    assert one != other
    assert one != "text"


def test_a_submodule_may_be_called_like_an_attribute_of_the_class() -> None:
    own = {name for name in vars(TracedGraph) if not name.startswith("_")}
    assert all(graph_path(name) != name for name in own)
    model = nn.Sequential()
    model.facts = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    assert torch.equal(trace(model, x)(x), model(x))
