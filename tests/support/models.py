"""Models for tests: torchvision's as their authors wrote them, with dropout off so that runs can be compared, and a U-Net."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn

__all__ = ["ZOO", "UNet", "deterministic"]


class Block(nn.Module):
    """Two convolutions, each with BatchNorm and an in-place ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """A U-Net written the ordinary way: the way down is kept in a list, the way up concatenates it."""

    def __init__(self, depth: int = 3, width: int = 8, classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(Block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:], strict=False))
        self.merge = nn.ModuleList(Block(2 * a, a) for a in widths[:-1])
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        x = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def deterministic(model: nn.Module) -> nn.Module:
    """Switch off everything that draws random numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def _segmentation(name: str) -> nn.Module:
    build: Callable[..., nn.Module] = getattr(torchvision.models.segmentation, name)
    return build(weights=None, weights_backbone=None, num_classes=5)


def _classifier(name: str, **options: Any) -> nn.Module:
    build: Callable[..., nn.Module] = getattr(torchvision.models, name)
    return build(weights=None, num_classes=10, **options)


ZOO: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (partial(_classifier, "resnet18"), 48),
    "resnet50": (partial(_classifier, "resnet50"), 48),
    "densenet121": (partial(_classifier, "densenet121"), 48),
    "googlenet": (partial(_classifier, "googlenet", init_weights=False), 64),
    "mobilenet_v3_small": (partial(_classifier, "mobilenet_v3_small"), 48),
    "vit_b_16": (partial(_classifier, "vit_b_16", image_size=32), 32),
    "swin_t": (partial(_classifier, "swin_t"), 64),
    "deeplabv3_resnet50": (partial(_segmentation, "deeplabv3_resnet50"), 48),
    "unet": (UNet, 32),
}
"""Name -> (constructor, image size)."""
