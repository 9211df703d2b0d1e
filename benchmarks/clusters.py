"""Published training runs beside what `pc.plan_for` predicts for their layout: one efficiency per GPU type, with its error.

    python benchmarks/clusters.py [--markdown benchmarks/results/clusters.md] [--only zb]

No GPU is needed: models are on `meta`. The layout, schedule, micro-batch and recomputation of each row are those of the publication.
Tensor parallelism, which is not a layout of `plan_for`, is a group of t GPUs that counts as one device of t times the rates, memory and
links; the two all-reduces of a block in each direction take the time of a ring over NVLink, added to the four linear layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import mean
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipecompile.costs import DEVICES, DeviceSpec, NodeCost
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import module_of
from pipecompile.layouts.enumeration import Layout
from pipecompile.layouts.estimate import LayoutEstimator
from pipecompile.layouts.hardware import Cluster
from pipecompile.layouts.pipeline_step import PipelineModel, PipelinePoint
from pipecompile.layouts.ring_seconds import Ring


class Attention(nn.Module):
    """Causal attention with `heads` heads of queries and `groups` of keys and values, of one fused projection."""

    def __init__(self, width: int, heads: int, groups: int, *, bias: bool) -> None:
        super().__init__()
        self.size = width // heads
        self.parts = [width, groups * self.size, groups * self.size]
        self.qkv = nn.Linear(width, sum(self.parts), bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = (part.view(b, s, -1, self.size).transpose(1, 2) for part in self.qkv(x).split(self.parts, -1))
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, width))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, heads, bias=True)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width, heads, groups, bias=False)
        self.norm2, self.up = nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def gpt(layers: int, width: int, heads: int, vocabulary: int = 51200) -> nn.Sequential:
    with torch.device("meta"):
        blocks = [GPTBlock(width, heads) for _ in range(layers)]
        head = nn.Linear(width, vocabulary, bias=False)
        return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.LayerNorm(width), head).bfloat16()


def llama(layers: int, width: int, heads: int, inner: int) -> nn.Sequential:
    with torch.device("meta"):
        blocks = [LlamaBlock(width, heads, 8, inner) for _ in range(layers)]
        head = nn.Linear(width, 128256, bias=False)
        return nn.Sequential(nn.Embedding(128256, width), *blocks, nn.RMSNorm(width), head).bfloat16()


@dataclass(frozen=True, slots=True)
class Run:
    """A published run: its model, GPUs and layout, and the measured seconds of a step of `batch` samples of `length` tokens."""

    source: str
    name: str
    model: Callable[[], nn.Module]
    key: str
    gpu: DeviceSpec
    gpus: int
    tp: int
    layout: Layout
    schedule: str
    chunks: int
    samples: int
    batch: int
    length: int
    recompute: bool
    seconds: float

    @property
    def cluster(self) -> Cluster:
        """The cluster, with a group of `tp` GPUs as one device."""
        t, one = self.tp, Cluster(device=self.gpu)
        flops = {dtype: rate * t for dtype, rate in self.gpu.flops.items()}
        spec = replace(self.gpu, flops=flops, bandwidth=self.gpu.bandwidth * t, memory=self.gpu.memory * t)
        per_node = min(8, self.gpus) // t
        return Cluster(
            device=spec, nodes=self.gpus // t // per_node, devices_per_node=per_node,
            link_inside=one.inside * t, link_between=one.between * t,
        )  # fmt: skip

    @property
    def point(self) -> PipelinePoint:
        count = self.batch // self.layout.replicas // self.samples
        return PipelinePoint(self.layout.pp, self.schedule, self.samples, count, self.chunks)


class TensorParallelPipelines(PipelineModel):
    """Pipelines whose devices are groups of GPUs: a linear layer that ends or begins a parallel part waits for an all-reduce."""

    run: Run

    def costs(self, samples: int) -> dict[str, NodeCost]:
        if samples in self._costs or self.run.tp == 1:
            return super().costs(samples)
        ring, costs = Ring(self.run.tp, self.run.gpu.link_bandwidth, self.run.gpu.link_latency), super().costs(samples)
        for node in compute_nodes(self.graph):
            layer, cost = module_of(node).rpartition(".")[2], costs[node.name]
            if node.op == "call_module" and layer in ("out", "down"):
                costs[node.name] = replace(cost, forward=cost.forward + ring.all_reduce(cost.output_bytes))
            elif node.op == "call_module" and layer in ("qkv", "up"):
                back = ring.all_reduce(samples * self.run.length * self.width * 2)
                costs[node.name] = replace(cost, backward=cost.backward + back, weight=cost.weight_grad)
        return costs

    @property
    def width(self) -> int:
        """The width of the model, that of its first embedding."""
        return next(p.shape[1] for p in self.graph.parameters() if p.dim() == 2)

    def at_efficiency(self, efficiency: float) -> TensorParallelPipelines:
        other = super().at_efficiency(efficiency)
        other.run = self.run
        return other


# -- the published rows ---------------------------------------------------------------------------------------------

A100, H100 = DEVICES["a100"], DEVICES["h100"]
TITAN_H100 = replace(H100, bandwidth=2.4e12, memory=96 << 30)
"""The H100 of torchtitan's tables: 96 GB of HBM2e with 2.4 TB/s, limited to 500 W."""


def megatron() -> list[Run]:
    """Narayanan et al., SC'21, arXiv 2104.04473, Table 1: parameters, heads, width, layers, tp, pp, GPUs, batch, TFLOP/s per GPU.

    The table has no micro-batch sizes: 4 samples where there is no pipeline, 1 elsewhere. Seconds come from its formula (3).
    """
    table = (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137), ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142), ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
        ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138), ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
        ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148), ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
        ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163), ("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
    )  # fmt: skip
    runs = []
    for name, heads, h, layers, tp, pp, gpus, batch, rate in table:
        flops = 96 * batch * 2048 * layers * h * h * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
        layout = Layout(pp, gpus // tp // pp)
        schedule, chunks = ("interleaved", 2) if pp > 1 else ("1f1b", 1)
        runs.append(
            Run("Megatron-LM", f"GPT {name}", lambda a=(layers, h, heads): gpt(*a), f"gpt{name}", A100, gpus, tp, layout,
                schedule, chunks, 4 if pp == 1 else 1, batch, 2048, True, flops / gpus / rate / 1e12)
        )  # fmt: skip
    return runs


def zero_bubble() -> list[Run]:
    """Qi et al., ICLR'24, arXiv 2401.10241, tables 3 and 4: samples per GPU and second of 1F1B and ZB-1p; no recomputation."""
    table = (
        ("1.5B", 22, 2304, 24, 8, 6, {24: (11.8, 12.9), 64: (13.6, 14.2)}),
        ("6.2B", 30, 4096, 32, 8, 3, {24: (3.50, 3.88), 64: (4.03, 4.20)}),
        ("14.6B", 46, 5120, 40, 16, 1, {48: (1.40, 1.61), 128: (1.64, 1.76)}),
        ("28.3B", 62, 6144, 48, 32, 1, {96: (0.76, 0.87), 256: (0.88, 0.96)}),
    )
    runs = []
    for name, layers, h, heads, pp, samples, rates in table:
        for count, each in rates.items():
            for schedule, rate in zip(("1f1b", "zb-h1"), each, strict=True):
                batch = count * samples
                runs.append(
                    Run("Zero Bubble", f"GPT {name}", lambda a=(layers, h, heads): gpt(*a), f"zb{name}", A100, pp, 1,
                        Layout(pp), schedule, 1, samples, batch, 1024, False, batch / rate / pp)
                )  # fmt: skip
    return runs


def torchtitan() -> list[Run]:
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3) and asyncTP_llama3_h100_2025-06_torchtitan.md."""
    small, large = (32, 4096, 32, 14336), (80, 8192, 64, 28672)
    table = (
        ("8B, FSDP", small, 8, 1, 2, False, 5762), ("8B, FSDP, torch.compile", small, 8, 1, 2, False, 6667),
        ("8B, FSDP", small, 128, 1, 2, False, 5605), ("8B, FSDP, torch.compile", small, 128, 1, 2, False, 6514),
        ("8B, FSDP, torch.compile", small, 64, 8, 12, False, 4378),
        ("70B, FSDP, torch.compile", large, 256, 8, 16, True, 597.3),
    )  # fmt: skip
    runs = []
    for name, shape, gpus, tp, local, recompute, rate in table:
        shards = gpus // tp
        runs.append(
            Run("torchtitan", f"Llama {name}", lambda a=shape: llama(*a), f"llama{shape[0]}", TITAN_H100, gpus, tp,
                Layout(1, 1, shards), "1f1b", 1, local, local * shards, 8192, recompute, local * 8192 / tp / rate)
        )  # fmt: skip
    return runs


# -- prediction and fit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fitted:
    """A run, its efficiency `fitted` alone, and the line `work / efficiency + rest` of its predicted seconds near it."""

    run: Run
    fitted: float
    work: float
    rest: float

    def seconds(self, efficiency: float) -> float:
        return self.work / efficiency + self.rest


_recorded: dict[str, PipelineModel] = {}
_pipelines: dict[tuple[str, int], TensorParallelPipelines] = {}


def pipelines_of(run: Run) -> TensorParallelPipelines:
    """Return the pipelines of a run. Runs of one model share the recording, those with one group of GPUs costs and cuts."""
    if run.key not in _recorded:
        tokens = torch.empty(2, run.length, dtype=torch.long, device="meta")
        _recorded.clear()
        _pipelines.clear()
        _recorded[run.key] = LayoutEstimator.of(run.model(), run.cluster, (tokens,)).pipelines
    usual = _recorded[run.key]
    known = _pipelines.get((run.key, run.tp))
    own = TensorParallelPipelines(usual.graph, usual.inputs, run.cluster, usual.options)
    if known is not None:
        own = replace(own, _nominal=known._nominal, _cuts=known._cuts)
    _pipelines[run.key, run.tp] = own
    own.run = run
    return own


def predicted(run: Run, efficiency: float) -> float:
    """Return the predicted seconds of a step."""
    estimator = LayoutEstimator(pipelines_of(run).at_efficiency(efficiency), run.batch, "adam")
    row = estimator.row(run.layout, run.point, (run.recompute,) * run.point.n_stages)
    assert row is not None
    return row.seconds.total


def fit(run: Run) -> Fitted:
    """Fit the efficiency of one run: secants of the seconds over the reciprocal efficiency, which are nearly a line."""
    slow, fast = 0.4, 0.6
    at_slow, at_fast = predicted(run, slow), predicted(run, fast)
    work = (at_slow - at_fast) / (1 / slow - 1 / fast)
    rest = at_slow - work / slow
    return Fitted(run, work / (run.seconds - rest), work, rest)


def row_of(one: Fitted, others: Sequence[Fitted]) -> list[str]:
    """Return the cells of a row: measured over predicted with the efficiency of the other rows of its GPU."""
    run, left_out = one.run, exp(mean(log(other.fitted) for other in others))
    seconds = one.seconds(left_out)
    return [
        run.source, run.name, str(run.gpus), str(run.tp), str(run.layout), f"{run.schedule}, {run.point.count} of {run.samples}",
        "all" if run.recompute else "", f"{run.seconds:.3g}", f"{seconds:.3g}", f"{run.seconds / seconds:.2f}",
        f"{one.rest / seconds:.0%}", f"{one.fitted:.2f}",
    ]  # fmt: skip


HEADERS = ("source", "model", "GPUs", "tp", "mesh", "schedule", "recomputed", "measured s", "predicted s",
           "measured / predicted", "independent of kernels", "own efficiency")  # fmt: skip


def table_of(fitted: Sequence[Fitted]) -> str:
    """Return the tables of all GPUs as Markdown, with the error by leaving one row out."""
    lines: list[str] = []
    for gpu in dict.fromkeys(one.run.gpu.name for one in fitted):
        own = [one for one in fitted if one.run.gpu.name == gpu]
        constant = exp(mean(log(one.fitted) for one in own))
        rows = [row_of(one, [other for other in own if other is not one] or own) for one in own]
        errors = [abs(log(float(row[9]))) for row in rows]
        lines += [
            "",
            f"## {gpu}: efficiency {constant:.2f}",
            "",
            "| " + " | ".join(HEADERS) + " |",
            "|---" * len(HEADERS) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines += ["", f"{len(own)} rows. Measured over predicted, each row left out of its fit: mean error "
                  f"{exp(mean(errors)) - 1:.1%}, largest {exp(max(errors)) - 1:.1%}."]  # fmt: skip
        for source in dict.fromkeys(one.run.source for one in own):
            of_source = [one.fitted for one in own if one.run.source == source]
            lines.append(f"{source} alone: {min(of_source):.2f} to {max(of_source):.2f}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--markdown", type=Path, help="file whose tables are replaced, below its line '<!-- tables -->'"
    )
    parser.add_argument("--only", default="", help="beginning of the sources that are run")
    arguments = parser.parse_args()
    fitted: list[Fitted] = []
    for run in (*zero_bubble(), *torchtitan(), *megatron()):
        if run.source.lower().startswith(arguments.only.lower()):
            start = perf_counter()
            fitted.append(fit(run))
            took = perf_counter() - start
            print(f"{run.source} {run.name} {run.gpus}: {fitted[-1].fitted:.3f}, {took:.1f} s", flush=True)
            if arguments.markdown:
                head = arguments.markdown.read_text(encoding="utf-8").partition("<!-- tables -->")[0]
                arguments.markdown.write_text(f"{head}<!-- tables -->\n{table_of(fitted)}\n", encoding="utf-8")
    print(table_of(fitted))


if __name__ == "__main__":
    main()
