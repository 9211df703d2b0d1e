"""The text of a traced graph, word by word."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from pipecompile.tracing import trace
from pipecompile.tracing.graph_facts import Ties

WANTED = """\
traced graph Net, evaluation
batch s = 3
device cpu
gradients any
outside mode 0
mode 0: grad on, nesting 0, cpu off cached
mode 1: grad off, nesting 0, cpu off cached
input x: 0
takes ((leaf,), {})
gives (leaf, leaf)
guard s > 2 | FILE:LINE in Net.forward
module layer = torch.nn.modules.linear.Linear('in_features=4, out_features=2, bias=False', {'weight': float32[2, 4].grad}, {})
tie layer add
before layer add

x = placeholder x() | float32[s, 4] | memory 0
size = call_method size(x, 0) | s | batch_size
layer = call_module layer(x) | float32[s, 2] | mode 0 | memory 1 | reads 2 | at FILE:LINE in Net.forward
enabled = call_function pipecompile.tracing.emit.node_writer.enabled() | None | switch
_set_grad_enabled = call_function torch._C._set_grad_enabled(False) | None | switch
add = call_method add_(layer, 1.0) | float32[s, 2] | mode 1 | memory 1 | writes 1 | at FILE:LINE in Net.forward
_set_grad_enabled_1 = call_function torch._C._set_grad_enabled(enabled) | None | switch
output = output output((add, size)) | (float32[s, 2], s)
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        if x.shape[0] <= 2:
            raise ValueError
        y = self.layer(x)
        with torch.no_grad():
            y.add_(1.0)
        return y, x.shape[0]


def test_every_part_of_the_text() -> None:
    graph = trace(Net().eval(), torch.randn(3, 4))
    graph.facts = replace(graph.facts, ties=Ties((("layer", "add"),), (("layer", "add"),)))
    symbol, text = str(graph.facts.symbol), str(graph)
    lines = [line.partition(__file__) for line in text.replace(symbol, "s").splitlines()]
    told = [f"{head}FILE:LINE in {place.partition(' in ')[2]}" if file else head for head, file, place in lines]
    assert told == WANTED.splitlines()


def test_a_graph_that_is_not_prepared_says_so() -> None:
    assert "\nties none\n" in str(trace(Net(), torch.randn(3, 4)))


def test_the_only_batch_size_and_the_grad_mode_are_printed() -> None:
    graph = trace(Net(), torch.randn(3, 4))
    graph.facts = replace(graph.facts, batch_size=3, grad_mode=False)
    assert {"only 3", "gradients off"} <= set(str(graph).splitlines())
