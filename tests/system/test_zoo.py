"""A sample of the zoo (benchmarks/zoo.py): small models of every library and kind, compared with eager in all that they do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from zoo_check import examine
from zoo_models import specimens
from zoo_models.specimen import Specimen, images
from zoo_table import is_equal, table

SAMPLE = {
    "transformers": (
        "SwinForImageClassification",  # windows, rolls
        "DebertaForMaskedLM",  # scripted functions
        "Wav2Vec2ForSequenceClassification",  # weight_norm, convolutions over time
        "JetMoeForCausalLM",  # chooses experts by the values of tensors
        "MixtralForCausalLM",  # experts
        "CLIPModel",  # two towers, a loss over the whole batch
    ),
    "timm": ("test_resnet", "test_vit"),
    "torchvision": ("shufflenet_v2_x0_5",),
    "smp": ("linknet (resnet18)",),
}


def _row(specimen: Specimen) -> dict[str, Any]:
    row: dict[str, Any] = {"library": specimen.library, "name": specimen.name}
    examine(specimen, lambda **event: row.update(event), lambda _phase: nullcontext(), baselines=False)
    return row


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("library", "name"), [(library, name) for library, names in SAMPLE.items() for name in names])
def test_equals_eager(library: str, name: str) -> None:
    pytest.importorskip({"smp": "segmentation_models_pytorch"}.get(library, library))
    row = _row(next(specimen for specimen in specimens(library) if specimen.name == name))
    assert is_equal(row), row


class Noisy(nn.Module):
    """Two runs of it never agree, so the zoo must notice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Conv2d(3, 3, 1) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * torch.rand(())


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("never")


@pytest.mark.parametrize("kind", [Noisy, Failing])
def test_what_is_not_equal_is_said(kind: type[nn.Module]) -> None:
    row = _row(Specimen("here", "wrong", kind.__name__, kind, images(4)))
    assert not is_equal(row)
    assert kind.__name__ in table([row]).split("What is not equal or is refused")[1].split("##")[0]
