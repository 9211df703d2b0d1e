"""Real networks cut into 2 to 16 stages: bottleneck, proven bound, gap and seconds, beside three usual ways to cut.

    python benchmarks/partition_models.py [--only resnet] [--stages 2 4 8 16] [--gap 0.001] [--markdown benchmarks/results/partition_models.md]

Analytic costs of training one micro-batch on A100s that NVLink joins; a tensor is sent to each device that needs it. The models are
on `meta`: nothing is computed. The other ways see the same costs: "chain" balances compute along the order of the calls, as
torchgpipe does for a Sequential, exactly; "parameters" and "layers" give every stage as many of them. Their cuts are
charged for what they send, as ours are. A ratio is their slowest stage over ours.
"""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import pipecompile as pc
from pipecompile.costs import analytic_costs, spec_for
from pipecompile.costs.problem_builder import build_problem
from pipecompile.partitioners import Partition, Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.chain_partition import cut_order
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck

CUTS = ("chain", "parameters", "layers")
"""Other ways to cut."""

HEADER = ("model", "nodes", "K", "bottleneck ms", "bound ms", "gap", "seconds", *CUTS)


class UNet(nn.Module):
    """Five levels down and up; every level up reads the one down beside it."""

    def __init__(self, depth: int = 5, width: int = 32) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.first = self._double(3, width)
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(sizes, sizes[1:], strict=False))
        self.merge = nn.ModuleList(self._double(2 * a, a) for a in sizes[:-1])
        self.last = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _double(a: int, b: int) -> nn.Sequential:
        convs = (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1))
        return nn.Sequential(*convs, nn.BatchNorm2d(b), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(nn.functional.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, merge, level in zip(reversed(self.up), reversed(self.merge), reversed(levels), strict=True):
            x = merge(torch.cat([up(x), level], 1))
        return self.last(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Language(nn.Module):
    """A decoder whose head has the weight of the embedding."""

    def __init__(self, layers: int, width: int, heads: int, words: int = 50_000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.layers = nn.Sequential(*[Attention(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.layers(x)))


def image(size: int, samples: int = 8) -> torch.Tensor:
    return torch.empty(samples, 3, size, size, device="meta")


def words() -> torch.Tensor:
    return torch.zeros(4, 512, dtype=torch.long, device="meta")


def vision(name: str) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, name)()


def nasnet() -> nn.Module:
    import timm

    return timm.create_model("nasnetalarge")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "resnet152": (lambda: vision("resnet152"), lambda: image(224)),
    "densenet201": (lambda: vision("densenet201"), lambda: image(224)),
    "efficientnet_v2_l": (lambda: vision("efficientnet_v2_l"), lambda: image(480)),
    "swin_v2_b": (lambda: vision("swin_v2_b"), lambda: image(256)),
    "unet, depth 5": (UNet, lambda: image(256)),
    "nasnetalarge": (nasnet, lambda: image(331)),
    "transformer, 4 x 128": (lambda: Language(4, 128, 2), words),
    "transformer, 12 x 768": (lambda: Language(12, 768, 12), words),
    "transformer, 48 x 1600": (lambda: Language(48, 1600, 25), words),
    "transformer, 80 x 8192": (lambda: Language(80, 8192, 64, 128_000), words),
}


def problem_of(name: str) -> tuple[Problem, dict[str, int]]:
    """The partition problem, and how many parameters each node has."""
    make, inputs = MODELS[name]
    with torch.device("meta"):
        model, x = make(), inputs()
    graph, spec = pc.trace(model, x), spec_for("a100")
    problem = build_problem(graph, analytic_costs(graph, (x,), device="a100"),
                         seconds_per_byte=1 / spec.link_bandwidth, latency=spec.link_latency)  # fmt: skip
    modules = {n.name: graph.get_submodule(str(n.target)) for n in graph.graph.nodes if n.op == "call_module"}
    return problem, {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}


# -- the other ways ---------------------------------------------------------------------------------------------------


def along(weights: Sequence[float], n_stages: int) -> list[int]:
    """Stages of even weight, in the order of the calls: every cluster where the middle of its weight falls."""
    total, before, stage = sum(weights) or 1.0, 0.0, []
    for weight in weights:
        stage.append(min(int((before + weight / 2) / total * n_stages), n_stages - 1))
        before += weight
    return stage


def other_ways(problem: Problem, parameters: dict[str, int], n_stages: int) -> tuple[Sequence[int], ...]:
    """The stage of every cluster: of a balanced chain, of even parameters and of even layers."""
    clusters = coarsen(problem)
    silent = coarsen(Problem(problem.nodes, problem.precedence, groups=problem.groups))
    chain = cut_order(silent, Machine.of(problem, n_stages), range(len(silent))) or []
    sizes = [float(sum(parameters.get(name, 0) for name in names)) for names in clusters.members]
    layers = [float(sum(name in parameters for name in names)) for names in clusters.members]
    return chain, along(sizes, n_stages), along(layers, n_stages)


def others(problem: Problem, parameters: dict[str, int], n_stages: int) -> tuple[float, ...]:
    """Their slowest stages."""
    clusters, stages = coarsen(problem), Machine.of(problem, n_stages)
    return tuple(bottleneck(clusters, stages, way) for way in other_ways(problem, parameters, n_stages))


def cuts(problem: Problem, parameters: dict[str, int], n_stages: int) -> list[dict[str, int]]:
    """The stage of every node, in their order."""
    members = coarsen(problem).members
    ways = other_ways(problem, parameters, n_stages)
    return [{name: stage for names, stage in zip(members, way, strict=True) for name in names} for way in ways]


@dataclass(frozen=True, slots=True)
class Row:
    """One model cut into one number of stages."""

    model: str
    n_nodes: int
    n_stages: int
    found: Partition
    others: tuple[float, ...]

    def cells(self) -> tuple[str, ...]:
        found = self.found
        gap = "0" if found.status == "optimal" else f"{found.gap:.2%}"
        ratios = (f"{value / found.bottleneck:.3f}" for value in self.others)
        times = (f"{1e3 * value:.4f}" for value in (found.bottleneck, found.lower_bound))
        return (self.model, str(self.n_nodes), str(self.n_stages), *times, gap, f"{found.seconds:.1f}", *ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--only", default="", help="part of the models' names")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--gap", type=float, default=0.001, help="distance from the bound at which a search ends")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, console = [], Console(width=140)
    for name in MODELS:
        if arguments.only in name:
            problem, parameters = problem_of(name)
            for n_stages in arguments.stages:
                found = pc.partition(problem, n_stages, time_limit=arguments.time_limit, gap=arguments.gap)
                found.verify(problem, n_stages)
                rows.append(Row(name, len(problem.nodes), n_stages, found, others(problem, parameters, n_stages)))
                console.print(*rows[-1].cells(), sep="  ")
    table = Table(*HEADER)
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)
    if arguments.markdown:
        lines = ["| " + " | ".join(row) + " |" for row in (HEADER, *(row.cells() for row in rows))]
        lines.insert(1, "|" + "---|" * len(HEADER))
        machine = (f"Python {platform.python_version()}, {platform.machine()}, torch {torch.__version__}, "
                   f"time_limit={arguments.time_limit:g}, gap={arguments.gap:g}, {os.cpu_count()} cores under a load of {os.getloadavg()[2]:.1f} "
                   "(with more processes than cores a search gets a part of its seconds), written by `benchmarks/partition_models.py`.")  # fmt: skip
        arguments.markdown.write_text(
            "\n".join(["# Cuts of real networks", "", machine, "", *lines, ""]), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
