"""A sample of benchmarks/losses.py: some kinds of losses, and five training scripts for a few steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "losses.py"


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("losses", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["losses"] = module
    spec.loader.exec_module(module)
    return module


LOSSES = benchmark()
CHANGED = ("sum", "sum over a fixed number", "dice", "cross entropy and dice", "two counts", "contrastive", "pairs of labels",
           "standard deviation", "normalised by the batch", "softmax over the batch", "hardest sample", "hardest two",
           "root of the mean", "median", "covariance")  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LOSSES.LOSSES)
def test_no_loss_is_silently_different(name: str) -> None:
    expected = "warned" if name in CHANGED else "refused" if name == "Python loop" else "right"
    assert LOSSES.verdict(LOSSES.LOSSES[name], 3, 7) == expected


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", LOSSES.SCRIPTS)
def test_a_script_trains_as_eager_does(name: str) -> None:
    if "transformers" in name or "packed" in name:
        pytest.importorskip("transformers")
    largest, told = LOSSES.train(LOSSES.SCRIPTS[name], 3, 3)
    if name == "contrastive in the batch":
        assert told, "samples of other micro-batches are missing"
    else:
        assert largest <= 1e-4
