"""Train a ResNet on pictures of stripes in four pipeline stages, as one would train it without a pipeline.

python examples/train_images.py --out out/images

Loader, precision, learning rates, validation and checkpoints are PyTorch's. Started again, it goes on, with the same losses, bit for bit.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

import pipecompile as pc

N_CLASSES, SIZE = 8, 32


def stripes(count: int, seed: int) -> TensorDataset:
    """Return `count` noisy pictures, (3, SIZE, SIZE) each; the angle of the stripes is the class."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(N_CLASSES, (count,), generator=draw)
    angle, phase = y * math.pi / N_CLASSES, 6.3 * torch.rand(count, generator=draw)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = angle.cos()[:, None, None] * rows + angle.sin()[:, None, None] * columns
    x = (along + phase[:, None, None]).sin()[:, None].expand(-1, 3, -1, -1)
    return TensorDataset(x + torch.randn(x.shape, generator=draw), y)


def batches(data: TensorDataset, epoch: int, size: int) -> Iterator[list[Tensor]]:
    """Return the loader of an epoch; its order depends on the epoch alone, so that a resumed run has the same one."""
    return iter(DataLoader(data, batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(epoch)))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # without GPUs the stages share the cores
    training, validation = stripes(options.samples, seed=1), stripes(options.samples // 4, seed=2)
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=N_CLASSES)
    model.fc = nn.Sequential(nn.Dropout(0.1), model.fc)

    pipe = pc.compile(model, 4, n_microbatches=4, loss_fn=cross_entropy, batch_norm="deferred", cost="analytic")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)

    file, first = Path(options.out) / "last.pt", 0
    if file.exists():
        last = torch.load(file)
        pipe.load_state_dict(last["model"])
        optimizer.load_state_dict(last["optimizer"])
        rates.load_state_dict(last["rates"])
        torch.set_rng_state(last["random"])  # dropout goes on where it was
        first = last["epoch"]

    for epoch in range(first, options.epochs):
        pipe.train()
        for number, (x, y) in enumerate(batches(training, epoch, options.batch)):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.amp):
                loss = pipe.step(x, target=y)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"epoch {epoch}  batch {number}  loss {loss.item():.9f}", flush=True)
        rates.step()
        result = pipe.evaluate(DataLoader(validation, batch_size=options.batch), accuracy)
        print(f"epoch {epoch}  validation loss {result.loss:.4f}  right {result.metrics['metric']:.1%}", flush=True)
        save(file, {"model": pipe.state_dict(), "optimizer": optimizer.state_dict(), "rates": rates.state_dict(),
                    "random": torch.get_rng_state(), "epoch": epoch + 1})  # fmt: skip


def save(file: Path, state: dict[str, object]) -> None:
    """Write a checkpoint; a crash while writing leaves the one before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/images", help="directory of the checkpoint")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in all")
    parser.add_argument("--samples", type=int, default=512, help="pictures to train on")
    parser.add_argument("--batch", type=int, default=32, help="pictures in a mini-batch")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where autocast does")
    return parser.parse_args()


if __name__ == "__main__":
    main()
