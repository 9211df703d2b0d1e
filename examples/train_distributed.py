"""Train torchvision's ResNet-18 as it is on several processes, one pipeline stage each. The same script on any number of them:

torchrun --standalone --nproc-per-node=2 examples/train_distributed.py --out out

Started again, it goes on from the last checkpoint, on as many processes as there are then; with `--max-restarts=3` torchrun does
that by itself when a process fails.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

import pipecompile as pc


def main() -> None:
    options = parse_options()
    join()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on every rank, and here the same data
    x = torch.randn(options.batch, 3, options.image_size, options.image_size)
    y = torch.randint(0, 10, (options.batch,))

    pipe = pc.compile(
        resnet18(num_classes=10),
        dist.get_world_size(),
        example_args=(x,),
        n_microbatches=4,
        loss_fn=cross_entropy,
        batch_norm="deferred",
        cost="analytic",
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)  # those of this rank's stage

    def state() -> dict[str, object]:
        return {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}

    first = 0
    if options.out and (last := pc.latest_checkpoint(options.out)):
        dcp.load(loaded := state(), checkpoint_id=last)
        pipe.load_state_dict(loaded["model"])
        pipe.load_optimizer_state_dict(optimizer, loaded["optimizer"])
        first = int(last.name)
    for step in range(first, options.steps):
        optimizer.zero_grad()
        loss = pipe.step(x, target=y)  # the same on every rank
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"{step:4d}  {loss:.4f}", flush=True)
        if options.out and ((step + 1) % options.every == 0 or step + 1 == options.steps):
            pc.save_checkpoint(state(), options.out, step + 1, keep=2)  # under the model's own names
    dist.destroy_process_group()


def join() -> None:
    """`init_process_group` for starts that may be followed by others: torchrun's store keeps the addresses of processes that are gone."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="directory for checkpoints, and to go on from")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--every", type=int, default=100, help="steps from checkpoint to checkpoint")
    parser.add_argument("--image-size", type=int, default=64, help="height and width of the random images")
    parser.add_argument("--batch", type=int, default=16, help="images in a mini-batch")
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        parser.error(
            "start it with torchrun, as in: torchrun --standalone --nproc-per-node=2 examples/train_distributed.py"
        )
    options = parser.parse_args()
    if min(options.steps, options.every, options.image_size, options.batch) < 1:
        parser.error("--steps, --every, --image-size and --batch are at least 1")
    return options


if __name__ == "__main__":
    main()
