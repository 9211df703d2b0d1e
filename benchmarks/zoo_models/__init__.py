"""Models of public libraries with random weights, as small as they go, each with inputs for any batch size."""

from __future__ import annotations

import importlib

from zoo_models.specimen import Specimen

__all__ = ["LIBRARIES", "specimens"]

LIBRARIES = ("transformers", "timm", "torchvision", "smp")


def specimens(library: str) -> list[Specimen]:
    """All models of one library that the zoo has."""
    found: list[Specimen] = importlib.import_module(f"zoo_models.{library}_models").specimens()
    return found
