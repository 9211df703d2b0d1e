"""segmentation_models_pytorch: every architecture, on a small encoder."""

from __future__ import annotations

from functools import partial
from typing import Any

import segmentation_models_pytorch as smp
from torch import nn

from zoo_models.specimen import Specimen, images

__all__ = ["specimens"]

ENCODERS = {"dpt": "tu-vit_tiny_patch16_224", "segformer": "mit_b0"}
OPTIONS: dict[str, dict[str, Any]] = {"dpt": {"dynamic_img_size": True}}
EXTRA = (("unet", "efficientnet-b0"), ("unet", "timm-regnetx_002"), ("fpn", "mobilenet_v2"), ("unet", "densenet121"),
         ("manet", "mit_b0"), ("deeplabv3plus", "tu-resnet18"))  # fmt: skip
SIZES = {"pan": 128}
"""Pixels a side; 64 where nothing is said."""


def specimens() -> list[Specimen]:
    rows = [(name, ENCODERS.get(name, "resnet18")) for name in smp.MODEL_ARCHITECTURES_MAPPING]
    return [
        Specimen("smp", name, f"{name} ({encoder})", partial(_build, name, encoder), images(SIZES.get(name, 64)))
        for name, encoder in (*rows, *EXTRA)
    ]


def _build(architecture: str, encoder: str) -> nn.Module:
    options = OPTIONS.get(architecture, {})
    model: nn.Module = smp.create_model(architecture, encoder, encoder_weights=None, classes=3, **options)
    return model
