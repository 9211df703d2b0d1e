"""Containers whose length differs from run to run: nothing may read them, and what does not is recorded."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.containers import flatten_containers
from pipecompile.tracing.opaque.unread_parts import UnreadPart, common_structure, leaves_in


@dataclass
class Seen:
    hidden: list[torch.Tensor]
    last: torch.Tensor


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.is_told = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Seen]:
        hidden: list[torch.Tensor] = []
        for layer in self.layers:
            if self.training and random.random() < 0.4:
                continue
            x = layer(x).tanh()
            hidden.append(x)
        return x, Seen(hidden if self.is_told else None, x)  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self, use: str = "nothing") -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), Layers(), nn.Linear(8, 3)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, seen = self.inner(self.first(x))
        if self.use == "output":
            return y, seen  # type: ignore[return-value]
        if self.use == "nothing":
            return self.last(y + seen.last)
        uses = {"length": lambda h: y * len(h), "item": lambda h: y + h[-1], "sum": lambda h: y + sum(h),
                "truth": lambda h: -y if h else y, "more": lambda h: y + [*h, y][-1], "all": lambda h: torch.stack(h)[0]}  # fmt: skip
        return self.last(uses[self.use](seen.hidden))


def test_hidden_states_that_layer_drop_makes_fewer_are_kept_whole_and_not_read() -> None:
    torch.manual_seed(0)
    random.seed(0)
    model, x = Model(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    graph = pc.trace(model, x)
    assert [reason.piece.path for reason in graph.facts.kept] == ["inner"]
    for seed in range(12):
        random.seed(seed)
        expected = twin(x)
        random.seed(seed)
        assert torch.equal(graph(x), expected)


@pytest.mark.parametrize("use", ["length", "item", "sum", "truth", "more", "output"])
def test_reading_such_a_part_is_refused_where_it_is_read(use: str) -> None:
    with pytest.raises(
        pc.TraceError, match=r"inner\(\.\.\.\)\[1\]\.hidden, of a part kept whole, has another length"
    ) as caught:
        pc.trace(Model(use), torch.randn(4, 8))
    assert use == "output" or "in Model.forward" in str(caught.value)


class Images(nn.Module):
    """Returns features as a list with an entry per sample inside a result, as vision-language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def features(self, x: torch.Tensor) -> Seen:
        is_image = x.abs().sum(2) > 0
        flat = self.first(x[is_image])
        return Seen(list(flat.split(is_image.sum(1).tolist())), flat)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat(self.features(x).hidden).tanh()).mean()


def test_a_list_with_an_entry_per_sample_is_read_in_a_recording_of_one_batch_size() -> None:
    torch.manual_seed(0)
    model, x = Images(), torch.randn(6, 2, 8)
    graph = pc.trace(model, x[:4])
    assert [guard.holds(4) for guard in graph.facts.guards] == [True]
    assert torch.equal(graph(x[:4]), model(x[:4]))
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=3, cost="analytic", devices=["cpu"] * 2, loss_fn=lambda loss: loss
    )
    torch.testing.assert_close(pipe.step(x), sum(model(part) for part in x.split(2)).detach() / 3)  # type: ignore[union-attr]


def test_code_in_c_that_reads_past_the_methods_finds_no_tensors() -> None:
    with pytest.raises(pc.TraceError, match="of a part kept whole, has another length"):
        pc.trace(Model("all"), torch.randn(4, 8))


def test_a_part_that_is_gone_is_an_error_of_the_run() -> None:
    model, x = Model(), torch.randn(4, 8)
    graph = pc.trace(model, x)
    model.inner.is_told = False
    with pytest.raises(pc.TraceError, match=r"PC112.*None instead of a container"):
        graph(x)


def test_what_values_have_in_common() -> None:
    long, short = (flatten_containers((torch.ones(2), [torch.ones(1)] * n, {"a": 1})) for n in (3, 2))
    common = common_structure([long[1], short[1]])
    assert common is not None
    assert common.num_leaves == 3
    for leaves, structure in (long, short):
        found = leaves_in(structure, leaves, common)
        assert found is not None
        assert isinstance(found[1], UnreadPart)
        assert isinstance(found[1], list)
        assert found[0] is leaves[0]
        assert found[2] == 1
        assert copy.deepcopy(found[1]) is found[1]
    other = flatten_containers((torch.ones(2), None, {"a": 1}))
    assert common_structure([long[1], other[1]]) is None, "Python may ask whether a part is None"
    assert leaves_in(flatten_containers((1, 2))[1], [1, 2], common) is None
    assert common_structure([flatten_containers([1, 2])[1], flatten_containers([1])[1]]) is None
