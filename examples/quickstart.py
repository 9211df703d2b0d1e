"""Train torchvision's ResNet-50 as it is in four pipeline stages, and compare every step with eager PyTorch.

python examples/quickstart.py --out out/resnet50
"""

import argparse
import copy

import torch
from eager import at_least_one, eager_step, gradient_difference
from torch.nn.functional import cross_entropy
from torchvision.models import resnet50

import pipecompile as pc

N_STAGES, N_MICROBATCHES = 4, 8


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # without GPUs the stages share the cores
    torch.manual_seed(0)
    model = resnet50(num_classes=10)
    eager = copy.deepcopy(model)
    x = torch.randn(options.batch, 3, options.image_size, options.image_size)
    y = torch.randint(0, 10, (options.batch,))

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

    eager, x, y = eager.to(pipe.devices[0]), x.to(pipe.devices[0]), y.to(pipe.devices[0])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
    eager_optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-4)
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
    parser.add_argument("--out", default="out/resnet50", help="directory for the plan, the schedule and the pictures")
    parser.add_argument("--steps", type=at_least_one, default=3, help="optimizer steps")
    parser.add_argument("--image-size", type=at_least_one, default=64, help="height and width of the random images")
    parser.add_argument("--batch", type=at_least_one, default=16, help="images in a mini-batch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
