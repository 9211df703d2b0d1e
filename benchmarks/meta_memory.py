"""How much memory each rank of a model on `meta` takes at most, beside what its stage needs: four ranks under gloo.

    python benchmarks/meta_memory.py --markdown benchmarks/results/meta_memory.md

A LLaMA of four times the memory of a rank. Its values come from `reset_parameters`, from a directory of
torch.distributed.checkpoint, or from files of safetensors; then it is trained with AdamW, and saved. The peak of a rank is the
`VmHWM` of its process, less what that was before `compile`: Python, PyTorch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD = 4
MIB = 1 << 20
ASKED = 1.2


def main() -> None:
    options = parse_options()
    if options.rank is not None:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        rows = [
            row
            for source in ("reset_parameters", "dcp", "safetensors", "eager")
            for row in run(source, directory, options)
        ]
    table = markdown(rows, options)
    print(table)
    if options.markdown:
        options.markdown.write_text(table)


def run(source: str, directory: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The ranks, all at once; what each has to say, phase by phase."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    command = [sys.executable, __file__, "--port", str(store.port), "--source", source, "--directory", directory,
               "--layers", str(options.layers), "--hidden", str(options.hidden)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(WORLD)
    ]
    said = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"{source}: a rank failed")
    return [
        {"source": source, "rank": rank, **json.loads(line)}
        for rank, text in enumerate(said)
        for line in text.splitlines()
        if line.startswith("{")
    ]


# -- one rank -------------------------------------------------------------------------------------------------------


def run_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import transformers
    from safetensors.torch import save_file

    import pipecompile as pc

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", options.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=WORLD, timeout=timedelta(minutes=10))
    size = options.hidden
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=size, intermediate_size=4 * size, num_hidden_layers=options.layers,
        num_attention_heads=8, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(4096, (4, 32))
    out = Path(options.directory)
    init = {"reset_parameters": "reset_parameters", "dcp": ["reset_parameters", out / "dcp"],
            "safetensors": ["reset_parameters", out / "safetensors"], "eager": None}[options.source]  # fmt: skip
    before = peak()

    def made() -> pc.Pipeline:
        with torch.device("cpu" if options.source == "eager" else "meta"):
            model = transformers.LlamaForCausalLM(config)
        return pc.compile(model, WORLD, n_microbatches=4, loss_fn=lambda y: y.logits.square().mean(), cost="analytic",
                          example_kwargs={"input_ids": tokens}, init=init)  # fmt: skip

    pipe = measured("built", before, made, lambda pipe: own_bytes(pipe))
    if options.source != "reset_parameters":
        dist.destroy_process_group()
        return
    optimizer = torch.optim.AdamW(pipe.parameters())

    def trained() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            pipe.step(input_ids=tokens)
            optimizer.step()

    measured("trained with AdamW", before, trained, lambda _: 4 * own_bytes(pipe))
    measured(
        "saved",
        before,
        lambda: dcp.save({"model": pipe.state_dict()}, checkpoint_id=out / "dcp"),
        lambda _: 4 * own_bytes(pipe),
    )
    (out / "safetensors").mkdir(exist_ok=True)
    save_file(dict(pipe.state_dict()), out / "safetensors" / f"model-{options.rank}.safetensors")
    dist.destroy_process_group()


def measured(phase: str, before: int, work: Callable[[], Any], share: Callable[[Any], int]) -> Any:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    made = work()
    print(json.dumps({"phase": phase, "before": before, "peak": peak(), "share": share(made)}), flush=True)
    return made


def peak() -> int:
    """Bytes of memory that the process had at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def own_bytes(pipe: Any) -> int:
    return sum(value.nbytes for value in (*pipe.parameters(), *pipe.buffers()) if not value.is_meta)


# -- the table ------------------------------------------------------------------------------------------------------


def markdown(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    whole = sum(row["share"] for row in rows if row["source"] == "reset_parameters" and row["phase"] == "built")
    lines = [
        "# Memory of a model on `meta`",
        "",
        f"`python benchmarks/meta_memory.py --layers {options.layers} --hidden {options.hidden}`: a LLaMA of {whole / MIB:.0f} MiB on"
        f" {WORLD} ranks. MiB. *Peak* is `VmHWM` less what it was before `compile`; *share* is what the stage needs: its parameters,"
        " or these with gradients and the two moments of AdamW. *Eager* is the same model built on every rank.",
        "",
        "| values from | phase | rank | before | share | peak | over 1.2 shares | peak / share |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        share, over = row["share"], row["peak"] - row["before"]
        lines.append(
            f"| {row['source']} | {row['phase']} | {row['rank']} | {row['before'] / MIB:.0f} | {share / MIB:.0f} | {over / MIB:.0f} |"
            f" {max(over - ASKED * share, 0) / MIB:.0f} | {over / share:.2f} |"
        )
    return "\n".join(lines) + "\n"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
