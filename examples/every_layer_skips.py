"""Train models whose values go to many later layers, in pipelines of three schedules; count what crosses, and compare with eager.

python examples/every_layer_skips.py [--models densenet unet++]

    attention-residuals   every block attends to the outputs of all earlier blocks (arXiv 2603.15031)
    hyper-connections     n residual streams, mixed anew by every layer (arXiv 2409.19606)
    unet++                a grid of blocks; each reads all blocks before it in its row, and one below (arXiv 1807.10165)
    densenet              every layer of a dense block reads all layers before it (arXiv 1608.06993)

The models are written the ordinary way. A value crosses once per device that reads it, straight from its stage; with
`gradient_sums="device"` one gradient comes back from each of these devices.
"""

import argparse
import copy
import warnings
from collections.abc import Callable

import torch
from eager import at_least_one, eager_step, gradient_difference
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d

import pipecompile as pc
from pipecompile.ir import HOST, Op

N_DEVICES, N_MICROBATCHES = 4, 8
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zbv": 2}
"""Schedules, and the stages that each has on a device."""


class AttentionBlock(nn.Module):
    """Attention over the terms of the residual stream, by a query of its own, then a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.norm = nn.Parameter(torch.zeros(width)), nn.LayerNorm(width, elementwise_affine=False)
        self.layer = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, terms: list[torch.Tensor]) -> torch.Tensor:
        scores = torch.stack([(self.norm(term) * self.query).sum(-1) for term in terms])
        weights = scores.softmax(0)
        return self.layer(sum(weight.unsqueeze(-1) * term for weight, term in zip(weights, terms, strict=True)))


class AttentionResiduals(nn.Module):
    """An embedding, blocks that attend to all before, and a head."""

    def __init__(self, n_blocks: int = 8, width: int = 32, words: int = 50) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList(AttentionBlock(width) for _ in range(n_blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        terms = [self.words(tokens)]
        for block in self.blocks:
            terms.append(block(terms))
        return self.head(terms[-1]).mean(1)


class HyperConnection(nn.Module):
    """A layer that reads a mixture of the streams, and adds what it computes to each of them with a weight of its own."""

    def __init__(self, width: int, n_streams: int, place: int) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.eye(n_streams)[place % n_streams])
        self.write, self.mix = nn.Parameter(torch.ones(n_streams)), nn.Parameter(torch.eye(n_streams))
        self.layer = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, streams: list[torch.Tensor]) -> list[torch.Tensor]:
        y = self.layer(sum(weight * stream for weight, stream in zip(self.read, streams, strict=True)))
        mixed = [sum(weight * stream for weight, stream in zip(row, streams, strict=True)) for row in self.mix]
        return [stream + weight * y for stream, weight in zip(mixed, self.write, strict=True)]


class HyperConnections(nn.Module):
    """An embedding in n streams, layers between which all streams go along, and a head on their sum."""

    def __init__(self, n_layers: int = 8, width: int = 32, n_streams: int = 3, words: int = 50) -> None:
        super().__init__()
        self.n_streams, self.words, self.head = n_streams, nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(HyperConnection(width, n_streams, i) for i in range(n_layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        streams = [self.words(tokens)] * self.n_streams
        for layer in self.layers:
            streams = layer(streams)
        return self.head(sum(streams)).mean(1)


def convolution(before: int, after: int) -> nn.Sequential:
    """Return a block of a convolutional network."""
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU())


class UNetPlusPlus(nn.Module):
    """Block (i, j) reads blocks (i, 0) to (i, j - 1) beside it, and block (i + 1, j - 1) below it."""

    def __init__(self, depth: int = 4, width: int = 8, n_classes: int = 10) -> None:
        super().__init__()
        self.depth, sizes = depth, [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList(convolution(before, after) for before, after in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleDict({
            f"{i}_{j}": convolution(j * sizes[i] + sizes[i + 1], sizes[i]) for j in range(1, depth) for i in range(depth - j)
        })  # fmt: skip
        self.head = nn.Conv2d(width, n_classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        blocks = {(0, 0): self.down[0](images)}
        for i in range(1, self.depth):
            blocks[i, 0] = self.down[i](max_pool2d(blocks[i - 1, 0], 2))
        for j in range(1, self.depth):
            for i in range(self.depth - j):
                beside = [blocks[i, k] for k in range(j)]
                below = interpolate(blocks[i + 1, j - 1], scale_factor=2.0)
                blocks[i, j] = self.up[f"{i}_{j}"](torch.cat([*beside, below], 1))
        return self.head(blocks[0, self.depth - 1]).mean((2, 3))


class DenseNet(nn.Module):
    """Dense blocks, each halved in size and channels by the next."""

    def __init__(self, n_layers: tuple[int, ...] = (4, 4, 4), growth: int = 8, n_classes: int = 10) -> None:
        super().__init__()
        channels = 2 * growth
        self.first = convolution(3, channels)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for count in n_layers:
            self.blocks.append(nn.ModuleList(convolution(channels + growth * i, growth) for i in range(count)))
            channels += growth * count
            self.transitions.append(nn.Sequential(nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)))
            channels //= 2
        self.head = nn.Linear(channels, n_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        y = self.first(images)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            features = [y]
            for layer in block:
                features.append(layer(torch.cat(features, 1)))
            y = transition(torch.cat(features, 1))
        return self.head(y.mean((2, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "attention-residuals": (AttentionResiduals, True),
    "hyper-connections": (HyperConnections, True),
    "unet++": (UNetPlusPlus, False),
    "densenet": (DenseNet, False),
}
"""Models, and whether each reads words; the others read images."""


def main() -> None:
    options = parse_options()
    warnings.simplefilter("ignore", pc.PartitionWarning)  # a few seconds are enough for a good cut
    torch.set_num_threads(1)  # without GPUs the stages share the cores
    print(
        "model                schedule     stages  crossings  values sent  gradients sent  loss    eager loss  difference"
    )
    for name in options.models:
        make, reads_words = MODELS[name]
        x = torch.randint(50, (16, 12)) if reads_words else torch.randn(16, 3, 16, 16)
        target = torch.randint(10, (16,))
        for schedule, chunks in SCHEDULES.items():
            torch.manual_seed(0)
            model = make()
            eager = copy.deepcopy(model)
            pipe = pc.compile(
                model, chunks * N_DEVICES, example_args=(x,), n_microbatches=N_MICROBATCHES, schedule=schedule,
                loss_fn=cross_entropy, devices=["cpu"] * N_DEVICES, gradient_sums="device", cost="analytic",
                bandwidth=1e10, time_limit=options.time_limit,
            )  # fmt: skip
            value, eager_value, difference = train(pipe, eager, x, target, options.steps)
            counts = f"{chunks * N_DEVICES:6d}  {crossings(pipe):9d}  {sent(pipe, False):11d}  {sent(pipe, True):14d}"
            print(f"{name:19}  {schedule:11}  {counts}  {value:6.4f}  {eager_value:10.4f}  {difference:.3g}")


def train(
    pipe: pc.Pipeline, eager: nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int
) -> tuple[float, float, float]:
    """Return the loss of the last step, that of eager, and the largest difference of two gradients."""
    optimizer, eager_optimizer = (torch.optim.AdamW(each.parameters()) for each in (pipe, eager))
    for _ in range(steps):
        optimizer.zero_grad()
        value = pipe.step(x, target=target)
        eager_optimizer.zero_grad()
        eager_value = eager_step(eager, cross_entropy, x, target, N_MICROBATCHES)
        difference = gradient_difference(pipe.model, eager)
        optimizer.step()
        eager_optimizer.step()
    return float(value), float(eager_value), difference


def crossings(pipe: pc.Pipeline) -> int:
    """Return the number of pairs of a value and another device that reads it: the least that must be sent per micro-batch."""
    placement, routes = pipe.plan.placement, [route for route in pipe.program.routes if route.source != HOST]
    pairs = {(route.value, placement[end]) for route in routes for end in route.consumers if end != HOST}
    return len(pairs - {(route.value, placement[route.source]) for route in routes})


def sent(pipe: pc.Pipeline, gradients: bool) -> int:
    """Return how many values, or gradients, devices send each other per micro-batch."""
    instructions = [i for row in pipe.program.rows for i in row if i.op is Op.SEND and i.peer != HOST]
    values = [instruction.reads[0].value for instruction in instructions]
    return sum((value.consumer is not None) == gradients and value.microbatch == 0 for value in values)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least_one, default=3, help="optimizer steps")
    parser.add_argument("--time-limit", type=float, default=2, help="seconds to look for a cut")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="models to train")
    return parser.parse_args()


if __name__ == "__main__":
    main()
