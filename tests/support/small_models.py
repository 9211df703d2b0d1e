"""Small models under the names of torchvision's large ones, for code of pages and examples that is run for what it does."""

from __future__ import annotations

from functools import partial

import pytest
import torchvision
from torchvision.models import ResNet, VisionTransformer
from torchvision.models.resnet import Bottleneck

__all__ = ["with_small_models"]


def with_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `resnet50`, `vit_b_16` and `vit_l_16` fewer blocks, each as wide as it is."""
    transformer = partial(VisionTransformer, image_size=224, patch_size=16, num_layers=4)
    for name, smaller in {
        "resnet50": partial(ResNet, Bottleneck, [1, 1, 1, 1]),
        "vit_b_16": partial(transformer, num_heads=12, hidden_dim=768, mlp_dim=3072),
        "vit_l_16": partial(transformer, num_heads=16, hidden_dim=1024, mlp_dim=4096),
    }.items():
        monkeypatch.setattr(torchvision.models, name, smaller)
