"""Train the ResNet of train_images.py in four pipeline stages, in a training loop of Lightning.

python examples/train_in_lightning.py --out out/lightning

`step` runs the backward, so the optimization is a manual one. Started again, it goes on, with the same losses, bit for bit.
"""

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler
from torchvision.models.resnet import BasicBlock, ResNet
from train_images import N_CLASSES, accuracy, stripes

import pipecompile as pc


@dataclass
class EpochOrder(Sampler):
    """Another order in each epoch, by the number of epochs before it alone, so that a resumed run has the same ones."""

    task: "StripeTask"
    size: int

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(int(self.task.epochs))).tolist()


class StripeTask(LightningModule):
    """The angle of stripes, learned by a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # `step` runs the backward
        self.register_buffer("epochs", torch.tensor(0))  # a buffer is in the checkpoint
        model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=N_CLASSES)
        model.fc = nn.Sequential(nn.Dropout(0.1), model.fc)
        self.net = pc.compile(model, 4, n_microbatches=4, loss_fn=cross_entropy, batch_norm="deferred", cost="analytic")

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)]

    def training_step(self, batch: list[Tensor], number: int) -> None:
        x, y = batch
        torch.manual_seed(self.global_step)  # of dropout
        loss = self.net.step(x, target=y)
        self.net.clip_grad_norm_(1.0)
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.print(f"epoch {self.current_epoch}  batch {number}  loss {loss.item():.9f}", flush=True)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        x, y = batch
        output = self.net(x)
        self.log_dict({"loss": cross_entropy(output.float(), y), "right": accuracy(output, y)}, batch_size=len(x))

    def on_train_epoch_end(self) -> None:
        self.epochs += 1
        self.lr_schedulers().step()
        result = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch}  validation loss {result['loss']:.4f}  right {result['right']:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/lightning", help="directory of the checkpoint")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in all")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where autocast does")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
    torch.manual_seed(0)
    torch.set_num_threads(1)  # without GPUs the stages share the cores
    saving = ModelCheckpoint(options.out, filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
    trainer = Trainer(
        max_epochs=options.epochs, accelerator="cpu", devices=1, precision="bf16-mixed" if options.amp else "32-true",
        callbacks=[saving], logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    last = Path(options.out) / "last.ckpt"
    task, data = StripeTask(), stripes(512, seed=1)
    loaders = DataLoader(data, 32, sampler=EpochOrder(task, len(data))), DataLoader(stripes(128, seed=2), 32)
    trainer.fit(task, *loaders, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
