"""Train a U-Net in four pipeline stages to outline discs, with a border of pixels that count in no micro-batch.

python examples/segment_images.py --out out/segments

Loader, mixed precision, learning rates, validation and checkpoints are PyTorch's own. Started again, the script goes on from its
last checkpoint, with the same losses, bit for bit, as a run that was never interrupted.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from unet import UNet

import pipecompile as pc

N_CLASSES, SIZE, IGNORED = 3, 32, 255


def discs(count: int, seed: int) -> TensorDataset:
    """Return noisy pictures, (3, SIZE, SIZE), of a bright and a dark disc, and the class of each pixel: IGNORED where an outline runs."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    y = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    for kind in range(1, N_CLASSES):
        centre_row, centre_column = SIZE * torch.rand(2, count, 1, 1, generator=draw)
        radius = 4 + 6 * torch.rand(count, 1, 1, generator=draw)
        outside = (rows - centre_row).hypot(columns - centre_column) - radius
        y[outside < 0], y[outside.abs() < 1] = kind, IGNORED
    brightness = torch.tensor([0.0, 1.0, -1.0])[y.where(y != IGNORED, 0)]
    return TensorDataset(brightness[:, None] + 0.7 * torch.randn(count, 3, SIZE, SIZE, generator=draw), y)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the pixels that count. Their number differs between micro-batches, and is the weight of each."""
    return cross_entropy(output.float(), target, ignore_index=IGNORED)


def overlap(output: Tensor, target: Tensor) -> Tensor:
    """Return the intersection over the union of prediction and target, as the mean over the classes."""
    counts = target != IGNORED
    pairs = [(output.argmax(1) == kind, target == kind) for kind in range(N_CLASSES)]
    return torch.stack([(a & b).sum() / ((a | b) & counts).sum() for a, b in pairs]).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/segments", help="directory of the checkpoint")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in all")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where autocast does")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # without GPUs the stages share the cores
    training, validation = discs(192, seed=1), discs(64, seed=2)
    model = UNet(N_CLASSES, width=8, levels=2)
    pipe = pc.compile(model, 4, n_microbatches=4, loss_fn=loss_of, batch_norm="deferred", cost="analytic")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: min(1, (batch + 1) / 4) * 0.97**batch)
    parts, file, first = {"model": pipe, "optimizer": optimizer, "rates": rates}, Path(options.out) / "last.pt", 0
    if file.exists():
        saved = torch.load(file)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["epoch"]
    file.parent.mkdir(parents=True, exist_ok=True)
    for epoch in range(first, options.epochs):
        pipe.train()
        order = torch.Generator().manual_seed(epoch)  # of the epoch alone, so that a resumed run has the same one
        for number, (x, y) in enumerate(DataLoader(training, 12, shuffle=True, generator=order)):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.amp):
                loss = pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            print(f"epoch {epoch}  batch {number}  loss {loss.item():.9f}", flush=True)
        result = pipe.evaluate(DataLoader(validation, batch_size=32), overlap)
        print(f"epoch {epoch}  validation loss {result.loss:.4f}  overlap {result.metrics['metric']:.1%}", flush=True)
        torch.save({n: p.state_dict() for n, p in parts.items()} | {"epoch": epoch + 1}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)  # a crash while writing leaves the checkpoint before


if __name__ == "__main__":
    main()
