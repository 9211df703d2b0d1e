"""How long a recording takes, beside one eager forward and `torch.export`, on one thread, in one run.

    python benchmarks/tracing.py [--only REGEX] [--markdown benchmarks/results/tracing.md]

(a) timm at 224 pixels, the best of two; the first recording of a process is not counted. (b) a Llama of 70 billion parameters
on `meta`, with the most memory that the process ever held before and after.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import pipecompile as pc

SAMPLE = (
    "resnet50 densenet121 efficientnet_b0 convnext_tiny inception_v3 vit_base_patch16_224 swin_tiny_patch4_window7_224 "
    "beit_base_patch16_224 xcit_nano_12_p8_224 coatnet_0_rw_224 mvitv2_tiny levit_128s"
)


def seconds(work: Callable[[], object], repeats: int = 2) -> float:
    """CPU seconds, the best of some."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def attempt(work: Callable[[], object]) -> float | None:
    try:
        return seconds(work, 1)
    except Exception as error:
        print(f"  export: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return None


def measure(
    model: nn.Module, args: tuple[Any, ...], *, eager: bool, between: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """One row. `between` is called before and after the recording."""
    model.train()
    graphs: list[Any] = []
    between()
    taken = seconds(lambda: graphs.append(pc.trace(model, *args)), 2 if eager else 1)
    between()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": sum(node.op.startswith("call") for node in graphs[0].graph.nodes),
        "eager": seconds(lambda: model(*args)) if eager else None,
        "trace": taken,
        "export": attempt(lambda: torch.export.export(model, args, strict=False)),
    }


def timm_rows(only: str) -> dict[str, dict[str, Any]]:
    rows = {}
    for name in filter(re.compile(only).search, SAMPLE.split()):
        rows[name] = measure(timm.create_model(name), (torch.randn(2, 3, 224, 224),), eager=True)
        print(name, rows[name], flush=True)
    return rows


def llama_row() -> tuple[dict[str, Any], float]:
    """A row, and by how many MiB recording raised the peak of resident memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
        ids = torch.zeros(2, 2048, dtype=torch.long)
    peaks: list[int] = []
    row = measure(
        model, (ids,), eager=False, between=lambda: peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    )
    return row, (peaks[1] - peaks[0]) / 1024


def table(rows: dict[str, dict[str, Any]]) -> Table:
    result = Table("", "parameters M", "nodes", "eager s", "record s", "x eager", "beyond 10 x eager s", "export s")
    for name, row in rows.items():
        eager, trace, export = row["eager"], row["trace"], row["export"]
        result.add_row(
            name, f"{row['parameters'] / 1e6:.0f}", str(row["nodes"]), "" if eager is None else f"{eager:.2f}", f"{trace:.2f}",
            "" if eager is None else f"{trace / eager:.1f}", "" if eager is None else f"{trace - 10 * eager:.2f}",
            "refused" if export is None else f"{export:.2f}",
        )  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pc.trace(nn.Linear(2, 2), torch.randn(2, 2))
    llama, grown = llama_row()
    print("Llama-70B", llama, grown, flush=True)
    rows = timm_rows(options.only)
    console = Console(record=True, width=120)
    console.print(table(rows | {"Llama-70B on meta": llama}))
    if rows:
        exported = [row["export"] for row in rows.values() if row["export"] is not None]
        console.print(f"timm: median {statistics.median(row['trace'] for row in rows.values()):.2f} s to record, "
                      f"{statistics.median(exported):.2f} s to export")  # fmt: skip
    console.print(
        f"Llama-70B: the peak of resident memory rose by {grown:.0f} MiB; its weights are 141 GB in bfloat16."
    )
    if options.markdown:
        options.markdown.write_text(
            f"# Tracing\n\n`python benchmarks/tracing.py`, torch {torch.__version__}, timm {timm.__version__}, CPU seconds of one thread, "
            f"batch 2, training mode; load average {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores.\n\n```\n{console.export_text()}```\n"
        )


if __name__ == "__main__":
    main()
