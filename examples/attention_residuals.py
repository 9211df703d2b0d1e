"""Train a model whose every block attends to the outputs of all earlier blocks, in pipelines of three schedules, and compare with eager.

python examples/attention_residuals.py

Attention residuals (arXiv 2603.15031) replace the sum of a residual stream by attention over its terms: the value of each block goes
to all later blocks. The model is written the ordinary way. A value crosses once per device that reads it, straight from its stage.
"""

import argparse
import copy
import warnings

import torch
from eager import eager_step, gradient_difference
from torch import nn
from torch.nn.functional import cross_entropy

import pipecompile as pc

N_DEVICES, N_MICROBATCHES = 4, 8
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zbv": 2}
"""Schedules, and the stages that each has on a device."""


class Block(nn.Module):
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
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        terms = [self.words(tokens)]
        for block in self.blocks:
            terms.append(block(terms))
        return self.head(terms[-1]).flatten(0, 1)


def main() -> None:
    options = parse_options()
    warnings.simplefilter("ignore", pc.PartitionWarning)  # a few seconds are enough for a good cut
    torch.set_num_threads(1)  # without GPUs the stages share the cores
    tokens, target = torch.randint(50, (16, 12)), torch.randint(50, (16, 12))
    print("schedule     stages  values sent  gradients sent  loss    eager loss  largest gradient difference")
    for schedule, chunks in SCHEDULES.items():
        torch.manual_seed(0)
        model = AttentionResiduals()
        eager = copy.deepcopy(model)
        pipe = pc.compile(
            model, chunks * N_DEVICES, example_args=(tokens,), n_microbatches=N_MICROBATCHES, schedule=schedule,
            loss_fn=loss, devices=["cpu"] * N_DEVICES, cost="analytic", bandwidth=1e10, time_limit=5,
        )  # fmt: skip
        optimizer, eager_optimizer = (torch.optim.AdamW(each.parameters()) for each in (pipe, eager))
        for _ in range(options.steps):
            optimizer.zero_grad()
            value = pipe.step(tokens, target=target)
            eager_optimizer.zero_grad()
            eager_value = eager_step(eager, loss, tokens, target, N_MICROBATCHES)
            difference = gradient_difference(model, eager)
            optimizer.step()
            eager_optimizer.step()
        values, gradients = traffic(pipe)
        counts = f"{chunks * N_DEVICES:6d}  {values:11d}  {gradients:14d}"
        print(f"{schedule:11}  {counts}  {value:6.4f}  {eager_value:10.4f}  {difference:.3g}")


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of all words."""
    return cross_entropy(output, target.flatten())


def traffic(pipe: pc.Pipeline) -> tuple[int, int]:
    """Return how many values, and how many gradients, devices send each other per micro-batch."""
    placement = pipe.plan.placement
    pairs = {(r.value, placement[end]) for r in pipe.plan.routes if r.source >= 0 for end in r.consumers if end >= 0}
    homes = {r.value: placement[r.source] for r in pipe.plan.routes if r.source >= 0}
    ends = [(r, end) for r in pipe.plan.routes if r.source >= 0 and r.gradient for end in r.consumers if end >= 0]
    return sum(homes[value] != device for value, device in pairs), sum(
        placement[end] != placement[route.source] for route, end in ends
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
