"""A number of the data that is late: a stage or a backward that does not wait for it runs without it."""

from __future__ import annotations

import time

import torch

__all__ = ["slow_number"]


def slow_number(x: torch.Tensor) -> float:
    """Return the number in a tensor, after 20 ms."""
    number = float(x)
    time.sleep(0.02)
    return number
