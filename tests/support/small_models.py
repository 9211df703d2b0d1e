"""Small models under the names of torchvision's large ones, for code of pages, examples and tests that is run for what it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torchvision
from torch import nn
from torchvision.models import DenseNet, ResNet, VisionTransformer
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.segmentation import deeplabv3

__all__ = ["with_small_models"]


def with_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give large models of torchvision fewer blocks, each as wide as it is, also as the backbone of DeepLabV3."""
    for name, smaller in SMALLER.items():
        monkeypatch.setattr(torchvision.models, name, smaller)
    monkeypatch.setattr(deeplabv3, "resnet50", SMALLER["resnet50"])


def _without_weights(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a constructor that takes the arguments of torchvision's functions; `weights` must be None."""

    def build(*, weights: None = None, **options: Any) -> nn.Module:
        assert weights is None
        return make(**options)

    return build


_transformer = partial(VisionTransformer, image_size=224, patch_size=16, num_layers=4)

SMALLER: dict[str, Callable[..., nn.Module]] = {
    name: _without_weights(make)
    for name, make in {
        "densenet121": partial(DenseNet, 32, (3, 4, 4, 3), 64),
        "resnet18": partial(ResNet, BasicBlock, [1, 1, 1, 1]),
        "resnet50": partial(ResNet, Bottleneck, [1, 1, 1, 1]),
        "vit_b_16": partial(_transformer, num_heads=12, hidden_dim=768, mlp_dim=3072),
        "vit_l_16": partial(_transformer, num_heads=16, hidden_dim=1024, mlp_dim=4096),
    }.items()
}
"""Name -> constructor."""
