"""Cut, placement, schedule and number of stages chosen together, beside interleaved 1F1B with as many layers in each stage.

    python benchmarks/joint.py [--markdown benchmarks/results/joint.md] [--only gemma] [--devices 8]

The models are those of transformers with the shapes of three families whose layers differ: a vocabulary that outweighs many layers
(Gemma 2), dense layers before mixtures of experts (DeepSeek V3), state-space layers between attention and wide layers (Nemotron-H).
They are on `meta`, costs are those of the data sheet of an H100 and its NVLink, a micro-batch is one sequence. AdaPtis (arXiv
2509.23722) publishes 1.42x on average, measured, for its own sizes of the three.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import pipecompile as pc
from pipecompile.costs import DEVICES, analytic_costs
from pipecompile.costs.node_cost import NodeCost
from pipecompile.driver.backend import Backend
from pipecompile.parameters.tied_mirrors import Mirrors

H100 = DEVICES["h100"]
LENGTH = 4096
CHUNKS = (2, 4)
"""Stages on a device of interleaved 1F1B; the better one is the baseline."""


def gemma(layers: int) -> nn.Module:
    return causal(
        transformers.Gemma2Config(
            num_hidden_layers=layers, hidden_size=2304, intermediate_size=9216, num_attention_heads=8,
            num_key_value_heads=4, head_dim=256, vocab_size=256000,
        )
    )  # fmt: skip


def deepseek(layers: int) -> nn.Module:
    return causal(
        transformers.DeepseekV3Config(
            num_hidden_layers=layers, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
            n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1, first_k_dense_replace=3,
            num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, vocab_size=129280,
        )
    )  # fmt: skip


def nemotron(layers: int) -> nn.Module:
    """Mamba and wide layers in turn, with attention in place of every seventh Mamba layer."""
    kinds = ["-" if i % 2 else "*" if i % 14 == 6 else "M" for i in range(layers)]
    return causal(
        transformers.NemotronHConfig(
            num_hidden_layers=layers, hybrid_override_pattern="".join(kinds), hidden_size=3072, intermediate_size=12288,
            mamba_num_heads=96, mamba_head_dim=64, n_groups=8, ssm_state_size=128, num_attention_heads=24,
            num_key_value_heads=8, head_dim=128, vocab_size=131072,
        )
    )  # fmt: skip


def causal(config: Any) -> nn.Module:
    config.use_cache = False
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Case:
    """A model of so many layers, in the list `layers_at`, on so many devices."""

    name: str
    model: Callable[[int], nn.Module]
    n_layers: int
    layers_at: str
    n_devices: int

    @property
    def count(self) -> int:
        """Micro-batches of a step."""
        return 4 * self.n_devices


CASES = tuple(
    Case(name, model, layers * n_devices, "model.layers", n_devices)
    for name, model, layers in (("gemma", gemma, 4), ("deepseek", deepseek, 4), ("nemotron", nemotron, 4))
    for n_devices in (8, 16)
)


class Costs:
    """The analytic costs of a graph, computed once for all compilations of the model."""

    def __init__(self) -> None:
        self.known: dict[str, NodeCost] | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[object]) -> dict[str, NodeCost]:
        self.known = self.known or analytic_costs(graph, inputs, device=H100)
        return self.known


def compiled(case: Case, model: nn.Module, costs: Costs, n_stages: int, **options: Any) -> pc.Pipeline:
    """Return a pipeline that is only planned: its parameters stay without memory."""
    ids = torch.zeros(case.count, LENGTH, dtype=torch.long, device="meta")
    with patch.object(Backend, "place", lambda *_: Mirrors(())):
        return pc.compile(
            model, n_stages, example_args=(ids,), n_microbatches=case.count, loss_fn=torch.Tensor.mean, check=False,
            devices=["cpu"] * case.n_devices, bandwidth=H100.link_bandwidth, costs=costs, **options,
        )  # fmt: skip


def equal_layers(case: Case, chunks: int) -> list[str]:
    """Return the first layers of the stages after the first one, of equal numbers of layers as far as they divide."""
    n_stages = chunks * case.n_devices
    return [f"{case.layers_at}.{case.n_layers * stage // n_stages}" for stage in range(1, n_stages)]


def row(case: Case) -> list[str]:
    model, costs, seconds = case.model(case.n_layers), Costs(), dict[str, float]()
    bounds = []
    for chunks in CHUNKS:
        if chunks * case.n_devices <= case.n_layers:
            options = {"schedule": "interleaved", "split_before": equal_layers(case, chunks)}
            pipe = compiled(case, model, costs, chunks * case.n_devices, **options)
            seconds[f"interleaved, {chunks}"] = pipe.simulate().makespan
    baseline = min(seconds, key=seconds.__getitem__)
    found = dict[str, float]()
    begin = perf_counter()
    for stages in (1, 2):
        pipe = compiled(case, model, costs, stages * case.n_devices, schedule="auto")
        found[f"{pipe.schedule.name}, {stages * case.n_devices} stages"] = pipe.simulate().makespan
        bounds.append(pipe.plan.step.lower_bound)
    best = min(found, key=found.__getitem__)
    size = sum(p.numel() for p in model.parameters()) / 1e9
    return [
        case.name, f"{size:.1f} B", str(case.n_layers), str(case.n_devices), str(case.count), baseline, f"{1e3 * seconds[baseline]:.1f}", best,
        f"{1e3 * found[best]:.1f}", f"{1e3 * min(bounds):.1f}", f"{seconds[baseline] / found[best]:.3f}", f"{perf_counter() - begin:.0f}",
    ]  # fmt: skip


HEADINGS = (
    "model", "parameters", "layers", "devices", "micro-batches", "baseline, stages a device", "ms", "chosen", "ms", "bound ms", "x baseline", "seconds",
)  # fmt: skip


def markdown(rows: Sequence[Sequence[str]]) -> str:
    speedups = [float(each[HEADINGS.index("x baseline")]) for each in rows]
    lines = [
        "# Cut, placement and schedule chosen together",
        "",
        f"`python benchmarks/joint.py`, torch {torch.__version__}, transformers {transformers.__version__}. Simulated; the bound is that of the step of every cut and schedule.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" * len(HEADINGS) + "|",
        *("| " + " | ".join(each) + " |" for each in rows),
        "",
        f"Geometric mean over the baseline: {geometric_mean(speedups):.3f}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--devices", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if options.only in case.name and options.devices in (0, case.n_devices):
            rows.append(row(case))
            print(" | ".join(rows[-1]), flush=True)
            if options.markdown:
                options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
