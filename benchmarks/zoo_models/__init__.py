"""Models of public libraries with random weights, as small as they go, each with inputs for any batch size."""

from __future__ import annotations

import importlib

from zoo_models.specimen import Specimen

__all__ = ["LIBRARIES", "specimens"]

LIBRARIES = ("transformers", "smp", "timm", "torchvision")


def specimens(library: str) -> list[Specimen]:
    """All models of one library that the zoo has."""
    module = importlib.import_module(f"zoo_models.{library.removesuffix('-relatives')}_models")
    found: list[Specimen] = module.relatives() if library.endswith("-relatives") else module.specimens()
    return found
