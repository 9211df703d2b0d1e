"""Train a U-Net, written the ordinary way, in four pipeline stages, and compare every step with eager PyTorch.

python examples/unet.py --out out/unet
"""

import argparse
import copy
from itertools import pairwise

import torch
from eager import at_least_one, eager_step, gradient_difference
from torch import nn
from torch.nn.functional import cross_entropy

import pipecompile as pc

N_STAGES, N_MICROBATCHES = 4, 8


class Block(nn.Sequential):
    """Two convolutions, each with BatchNorm and an in-place ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """Four levels down and up again; what was seen on the way down is kept and joined on the way up."""

    def __init__(self, classes: int = 3, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        steps = list(pairwise(widths))
        self.down = nn.ModuleList(Block(a, b) for a, b in [(3, width), *steps])
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(steps))
        self.join = nn.ModuleList(Block(2 * a, a) for a, _ in reversed(steps))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        x = skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # without GPUs the stages share the cores
    torch.manual_seed(0)
    model = UNet()
    eager = copy.deepcopy(model)
    x = torch.randn(options.batch, 3, options.image_size, options.image_size)
    y = torch.randint(0, 3, (options.batch, options.image_size, options.image_size))

    pipe = pc.compile(
        model,
        N_STAGES,
        example_args=(x,),
        n_microbatches=N_MICROBATCHES,
        schedule="1f1b",
        loss_fn=cross_entropy,
        batch_norm="each",
    )
    print(pipe)

    print("\nskips, each copied once, straight from the stage that makes it to the stage that uses it:")
    for route in pipe.plan.routes:
        for consumer in route.skips:
            size = f"{route.nbytes / 1024:,.0f} KiB per micro-batch"
            print(f"  {route.value:12}  stage {route.source} to stage {consumer}  {size}")

    eager, x, y = eager.to(pipe.devices[0]), x.to(pipe.devices[0]), y.to(pipe.devices[0])
    optimizer = torch.optim.AdamW(pipe.parameters())
    eager_optimizer = torch.optim.AdamW(eager.parameters())
    print("\nstep    loss  eager loss  largest gradient difference")
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = pipe.step(x, target=y)
        eager_optimizer.zero_grad()
        eager_loss = eager_step(eager, cross_entropy, x, y, N_MICROBATCHES)
        difference = gradient_difference(model, eager)
        print(f"{step:4d}  {loss:6.4f}  {eager_loss:10.4f}  {difference:.3g}")
        optimizer.step()
        eager_optimizer.step()

    print(f"\nbubble: {pipe.simulate().bubble:.1%} simulated, {pipe.measured.bubble:.1%} measured in the last step")
    print("wrote:")
    for path in pipe.dump(options.out):
        print(f"  {path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/unet", help="directory for the plan, the schedule and the pictures")
    parser.add_argument("--steps", type=at_least_one, default=3, help="optimizer steps")
    parser.add_argument("--image-size", type=at_least_one, default=64, help="height and width of the random images")
    parser.add_argument("--batch", type=at_least_one, default=16, help="images in a mini-batch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
