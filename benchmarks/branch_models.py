"""Cuts by the step of real models with branches, beside the cut with the least bottleneck and a search of twenty times the effort.

    python benchmarks/branch_models.py [--devices 4] [--resume FILE] [--longer-from TABLE] [--markdown benchmarks/results/branch_models.md] [--only clip]

Analytic costs, links of 2 GB/s, 1F1B, eight micro-batches of two samples. "Ours" is the cut of `compile`; "longer search" the best
cut that the same search finds with twenty times as many moves, kicks, slides, partial cuts and simulations. An exhaustive search is out of
reach for these graphs; the bound is on all cuts. With `--longer-from`, the longer search is not run again: its steps are those of an
earlier table, or ours where they are shorter. Nothing is measured but the CPU seconds of `compile`, tracing included.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any
from unittest.mock import patch

import msgspec
import timm
import torch
import torchvision
import transformers
from torch import nn

import pipecompile as pc
from pipecompile.partitioners import sliding_cuts, step_cuts
from pipecompile.planning import step_search

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from every_layer_skips import DenseNet, UNetPlusPlus

from benchmarks.partition_models import UNet

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

MICROBATCHES, SAMPLES = 8, 16

TIMES = 20
"""Effort of the longer search, as a multiple of that of `compile`."""


def image(model: nn.Module, size: int = 64, channels: int = 3) -> Example:
    return model, (torch.zeros(SAMPLES, channels, size, size),), {}


def timm_image(name: str, size: int = 64) -> Example:
    return image(timm.create_model(name, num_classes=10), size)


def vision(name: str, size: int = 64, **options: Any) -> Example:
    return image(torchvision.models.get_model(name, weights=None, num_classes=10, **options), size)


def clip() -> Example:
    config = transformers.CLIPConfig(
        text_config={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 500},
        vision_config={"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
    )  # fmt: skip
    ids = torch.randint(500, (SAMPLES, 16))
    return transformers.CLIPModel(config), (), {"input_ids": ids, "pixel_values": torch.zeros(SAMPLES, 3, 32, 32)}


class Ranking(nn.Module):
    """DLRM: an embedding table per categorical feature, a tower for dense features, and products of all pairs before the top."""

    def __init__(self, tables: int = 8, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10_000 * (1 + i), width) for i in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        rows = torch.stack([bottom, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(rows, rows.mT)
        upper = torch.triu_indices(rows.shape[1], rows.shape[1], 1)
        return self.top(torch.cat([bottom, products[:, upper[0], upper[1]]], dim=1))


class TwoEncoders(nn.Module):
    """An image encoder and a text encoder side by side, joined in front of a decoder: the shape of a vision-language model."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, width, 8, 8), nn.Embedding(1000, width)
        self.image = nn.ModuleList(self._layer(width) for _ in range(depth))
        self.text = nn.ModuleList(self._layer(width) for _ in range(depth // 2))
        self.decoder = nn.ModuleList(self._layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 1000)

    @staticmethod
    def _layer(width: int) -> nn.Module:
        return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)

    def forward(self, picture: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen, read = self.patches(picture).flatten(2).mT, self.words(ids)
        for layer in self.image:
            seen = layer(seen)
        for layer in self.text:
            read = layer(read)
        joined = torch.cat([seen, read], dim=1)
        for layer in self.decoder:
            joined = layer(joined)
        return self.head(joined[:, -1])


def t5() -> Example:
    config = transformers.T5Config(
        vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4, use_cache=False
    )
    ids = torch.randint(500, (SAMPLES, 16))
    return transformers.T5ForConditionalGeneration(config), (), {"input_ids": ids, "decoder_input_ids": ids}


MODELS: Mapping[str, Callable[[], Example]] = {
    "CLIP": clip,
    "DLRM": lambda: (Ranking(), (torch.zeros(SAMPLES, 13), torch.randint(1000, (SAMPLES, 8))), {}),
    "two encoders": lambda: (TwoEncoders(), (torch.zeros(SAMPLES, 3, 64, 64), torch.randint(1000, (SAMPLES, 32))), {}),
    "T5": t5,
    "Inception v3": lambda: vision("inception_v3", 128, aux_logits=False, init_weights=False),
    "GoogLeNet": lambda: vision("googlenet", aux_logits=False, init_weights=False),
    "NASNet": lambda: timm_image("nasnetalarge", 96),
    "PNASNet": lambda: timm_image("pnasnet5large", 96),
    "HRNet": lambda: timm_image("hrnet_w18_small"),
    "DLA": lambda: timm_image("dla34"),
    "SelecSLS": lambda: timm_image("selecsls42"),
    "Res2Net": lambda: timm_image("res2net50_14w_8s"),
    "ResNeSt": lambda: timm_image("resnest14d"),
    "SKNet": lambda: timm_image("skresnet18"),
    "DenseNet-121": lambda: vision("densenet121"),
    "ShuffleNet v2": lambda: vision("shufflenet_v2_x1_0"),
    "DeepLab v3": lambda: image(torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5)),
    "U-Net": lambda: image(UNet(depth=4, width=16)),
    "U-Net++": lambda: image(UNetPlusPlus()),
    "dense blocks": lambda: image(DenseNet()),
}  # fmt: skip


class Compared(msgspec.Struct, frozen=True):
    """Milliseconds of the steps of one model, with the number of its nodes and the CPU seconds of `compile`."""

    name: str
    nodes: int
    ours: float
    bottleneck: float
    longer: float
    bound: float
    seconds: float


def step_of(build: Callable[[], Example], devices: int) -> tuple[pc.Pipeline, float]:
    """Return a compiled model, and the CPU seconds of that."""
    torch.manual_seed(0)
    model, args, kwargs = build()
    start = process_time()
    pipe = pc.compile(
        model.eval(), devices, example_args=args, example_kwargs=kwargs, n_microbatches=MICROBATCHES, schedule="1f1b",
        cost="analytic", bandwidth=2e9, loss_fn=total, devices=["cpu"] * devices, check=False,
    )  # fmt: skip
    return pipe, process_time() - start


def total(output: Any) -> torch.Tensor:
    """Return a loss of any output: the sum of its largest tensor."""
    tensors = [each for each in torch.utils._pytree.tree_leaves(output) if isinstance(each, torch.Tensor)]
    return max(tensors, key=lambda each: each.numel()).float().mean()


def compare(name: str, devices: int, longer_ms: float | None = None) -> Compared:
    """Compile a model, and again with the longer search unless the milliseconds that one has found are given."""
    pipe, seconds = step_of(MODELS[name], devices)
    if longer_ms is not None:
        known = pipe.plan.step
        assert known is not None
        best = min(1e3 * known.seconds, longer_ms)
        figures = 1e3 * known.seconds, 1e3 * known.first_seconds, best, 1e3 * known.lower_bound
        return Compared(name, len(pipe.plan.stage_of), *figures, seconds)
    with (
        patch.multiple(sliding_cuts, _WORK=TIMES * sliding_cuts._WORK),
        patch.multiple(step_cuts, _WORK=TIMES * step_cuts._WORK, _KICKS=TIMES * step_cuts._KICKS, _ANNEALING=TIMES * step_cuts._ANNEALING, _VISITS=TIMES * step_cuts._VISITS),
        patch.multiple(step_search, _MOST=TIMES * step_search._MOST, _CLIMB=TIMES * step_search._CLIMB, _ACTIONS=TIMES * step_search._ACTIONS, _WORTH=0.0),
    ):  # fmt: skip
        longer, _ = step_of(MODELS[name], devices)
    step, other = pipe.plan.step, longer.plan.step
    assert step is not None
    assert other is not None
    best = min(step.seconds, other.seconds)
    rows = (1e3 * each for each in (step.seconds, step.first_seconds, best, max(step.lower_bound, other.lower_bound)))
    return Compared(name, len(pipe.plan.stage_of), *rows, seconds)


def longer_steps(table: Path) -> dict[str, float]:
    """Return the milliseconds of the longer search of an earlier table, by model."""
    rows = [line.strip("| ").split(" | ") for line in table.read_text(encoding="utf-8").splitlines() if " | " in line]
    return {cells[0]: float(cells[HEADER.index("longer search")]) for cells in rows if cells[0] in MODELS}


HEADER = (
    "model",
    "nodes",
    "ours ms",
    "least bottleneck",
    "longer search",
    "bound",
    "ours / longer",
    "ours / bound",
    "CPU s",
)


def row(one: Compared) -> tuple[str, ...]:
    times = (f"{each:.3f}" for each in (one.ours, one.bottleneck, one.longer, one.bound))
    return (
        one.name,
        str(one.nodes),
        *times,
        f"{one.ours / one.longer:.4f}",
        f"{one.ours / one.bound:.3f}",
        f"{one.seconds:.1f}",
    )


def page(found: list[Compared], command: str) -> str:
    """Return the table as markdown."""
    ratios = [one.ours / one.longer for one in found]
    said = f"{len(found)} models: ours over the longer search {mean(ratios):.4f} on average, {max(ratios):.4f} at most."
    lines = [
        "# Cuts of real models with branches",
        "",
        f"Simulated, written by `{command}`, torch {torch.__version__}.",
        "",
        said,
        "The longer search is that of an earlier table, or ours where shorter." if "--longer-from" in command else "",
        "",
    ]
    cells = [HEADER, ("---",) * len(HEADER), *map(row, found)]
    return "\n".join([*lines, *("| " + " | ".join(each) + " |" for each in cells), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), help="these models")
    parser.add_argument("--resume", type=Path, help="file of results, one JSON object a line")
    parser.add_argument("--longer-from", type=Path, help="an earlier table, with the steps of the longer search")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = arguments.resume.read_bytes().splitlines() if arguments.resume and arguments.resume.exists() else []
    known = {one.name: one for one in (msgspec.json.decode(line, type=Compared) for line in lines)}
    longer = longer_steps(arguments.longer_from) if arguments.longer_from else {}
    for name in arguments.only:
        if name not in known:
            known[name] = compare(name, arguments.devices, longer.get(name))
            print(*row(known[name]), flush=True)
            if arguments.resume:
                with arguments.resume.open("ab") as results:
                    results.write(msgspec.json.encode(known[name]) + b"\n")
    command = f"python benchmarks/branch_models.py --devices {arguments.devices}"
    command += " --longer-from TABLE" if longer else ""
    text = page([known[name] for name in arguments.only], command)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
