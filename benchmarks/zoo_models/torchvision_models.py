"""torchvision: everything that `list_models` lists."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchvision import models

from zoo_models.specimen import Call, Specimen, images

__all__ = ["specimens"]

GROUPS = ("", "segmentation", "video", "optical_flow", "detection", "quantization")
SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}
"""Pixels a side; 64 where nothing is said."""

PROPOSALS = {f"rpn_{step}_nms_top_n_{mode}": 40 for step in ("pre", "post") for mode in ("train", "test")} | {
    "box_batch_size_per_image": 16
}
"""Fewer than thousands for each of these small images."""

CLIPS = {"s3d": (14, 224)}
"""Frames and pixels; 4 and 64 where nothing is said."""


SMALLER = (
    "convnext_large efficientnet_b6 efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s maxvit_t regnet_x_16gf "
    "regnet_x_32gf regnet_y_128gf regnet_y_16gf regnet_y_32gf resnext101_32x8d resnext101_64x4d resnext50_32x4d swin_b swin_s "
    "swin_v2_b swin_v2_s vit_b_16 vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2 deeplabv3_resnet101 "
    "deeplabv3_resnet50 fcn_resnet101"
).split()
"""Models whose steps take many seconds on one thread, beside those of video and detection."""


def specimens() -> list[Specimen]:
    return [
        _specimen(group, name)
        for group in GROUPS
        for name in models.list_models(module=importlib.import_module(f"torchvision.models.{group}".rstrip(".")))
    ]


def _specimen(group: str, name: str) -> Specimen:
    skipped = "int8 kernels, evaluation only: nothing to train" if group == "quantization" else ""
    build, inputs = _MAKERS.get(group, _classifier)(name)
    lists = ("images", "targets") if group == "detection" else ()
    whole = Specimen("torchvision", group or "classification", name, build, inputs, skipped, lists)
    if name in SMALLER or group in ("video", "detection"):
        has_any_size = group == "video" and name not in CLIPS and not name.startswith("mvit")
        inputs = images(64) if name == "maxvit_t" else _clips(4, 32) if has_any_size else inputs
        options = {"input_size": (64, 64)} if name == "maxvit_t" else {}
        return replace(whole, smaller=replace(whole, build=partial(_with_fewer_blocks, build, options), inputs=inputs))
    return whole


def _classifier(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Call]]:
    size = SIZES.get(name, 64)
    options: dict[str, Any] = {"num_classes": 10}
    if name.startswith("vit_"):
        options["image_size"] = size
    if name.startswith("maxvit"):
        options["input_size"] = (size, size)
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # scipy's truncated normal takes minutes
    return partial(models.get_model, name, weights=None, **options), images(size)


def _segmentation(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Call]]:
    options: dict[str, Any] = {"num_classes": 5}
    if not name.startswith("lraspp"):
        options["aux_loss"] = True
    return partial(models.get_model, name, weights=None, weights_backbone=None, **options), images(64)


def _video(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Call]]:
    frames, size = CLIPS.get(name, (4, 64))
    build = _smaller_mvit if name.startswith("mvit") else partial(models.get_model, weights=None, num_classes=10)
    return partial(build, name), _clips(frames, size)


def _clips(frames: int, size: int) -> Callable[[int], Call]:
    return lambda n: Call((torch.randn(n, 3, frames, size, size),))


def _smaller_mvit(name: str) -> nn.Module:
    """Its builders insist on 16 frames of 224 pixels, which it takes minutes to train on."""

    full = models.video.mvit.MViT

    def smaller(spatial_size: Any, temporal_size: int, **options: Any) -> nn.Module:  # noqa: ARG001 what is replaced
        return full(spatial_size=(64, 64), temporal_size=4, **options)

    with mock.patch.object(models.video.mvit, "MViT", smaller):
        model: nn.Module = models.get_model(name, weights=None, num_classes=10)
    return model


def _flow(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Call]]:
    def inputs(n: int) -> Call:
        return Call((torch.randn(n, 3, 128, 128), torch.randn(n, 3, 128, 128)), {"num_flow_updates": 3})

    return partial(models.get_model, name, weights=None), inputs


def _detection(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Call]]:
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 4}
    if not name.startswith("ssd"):
        options |= {"min_size": 64, "max_size": 64}  # else every image is first made 800 pixels wide
    if "rcnn" in name:
        options |= PROPOSALS

    def inputs(n: int) -> Call:
        return Call(([torch.rand(3, 64, 64) for _ in range(n)], [_target(name) for _ in range(n)]))

    return partial(models.get_model, name, **options), inputs


def _target(name: str) -> dict[str, torch.Tensor]:
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    if name.startswith("maskrcnn"):
        target["masks"] = torch.ones(1, 64, 64, dtype=torch.uint8)
    if name.startswith("keypointrcnn"):
        target["keypoints"] = torch.ones(1, 17, 3) * 20
    return target


def _with_fewer_blocks(build: Callable[..., nn.Module], options: dict[str, Any]) -> nn.Module:
    """Build a model with one block in each stage, two where every other one is another kind, and every width as it is."""
    with ExitStack() as stack:
        for path, name, shorten in _CLASSES:
            module = importlib.import_module(f"torchvision.models.{path}")
            stack.enter_context(mock.patch.object(module, name, _shortened(getattr(module, name), shorten)))
        return build(**options)


def _shortened(full: Callable[..., nn.Module], shorten: Callable[[list[Any], dict[str, Any]], None]) -> Any:
    def build(*args: Any, **options: Any) -> nn.Module:
        positional = list(args)
        shorten(positional, options)
        return full(*positional, **options)

    return build


def _settings(args: list[Any], _options: dict[str, Any]) -> None:
    for setting in args[0]:
        setting.num_layers = 1


def _block_depths(args: list[Any], _options: dict[str, Any]) -> None:
    args[0].depths = [1] * len(args[0].depths)


def _layers(args: list[Any], _options: dict[str, Any]) -> None:
    args[1] = [1] * len(args[1])


def _option(name: str, value: Any, **others: Any) -> Callable[[list[Any], dict[str, Any]], None]:
    def shorten(_args: list[Any], options: dict[str, Any]) -> None:
        options.update({name: value} | others)

    return shorten


_CLASSES: tuple[tuple[str, str, Callable[[list[Any], dict[str, Any]], None]], ...] = (
    ("convnext", "ConvNeXt", _settings),
    ("efficientnet", "EfficientNet", _settings),
    ("regnet", "RegNet", _block_depths),
    ("resnet", "ResNet", _layers),
    ("swin_transformer", "SwinTransformer", _option("depths", [2, 2, 2, 2])),
    ("video.swin_transformer", "SwinTransformer3d", _option("depths", [2, 2, 2, 2])),
    ("vision_transformer", "VisionTransformer", _option("num_layers", 2)),
    ("maxvit", "MaxVit", _option("block_layers", [1, 1, 1, 1], partition_size=2)),
)
"""Module, class, and what shortens the arguments of its builders."""

_MAKERS = {"segmentation": _segmentation, "video": _video, "optical_flow": _flow, "detection": _detection}
