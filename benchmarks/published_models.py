"""The models of GPipe's and torchgpipe's published tables as modules that one would write, with their skips in plain sight.

U-Net (Ronneberger et al. 2015, in the form of torchgpipe, arXiv 2004.09910, section 4): `UNet(blocks, width)`.
AmoebaNet-D (Real et al. 2019, arXiv 1802.01548, figure 2; GPipe, arXiv 1811.06965, table 1): `AmoebaNetD(layers, width)`.
Their numbers of parameters are the published ones (tests/system/test_published.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["AmoebaNetD", "UNet"]


def _level(taken: int, inner: int, given: int, blocks: int) -> nn.Sequential:
    """So many blocks of convolution, dropout, normalisation and activation; the inner ones are `inner` channels wide."""
    widths = [taken, *[inner] * (blocks - 1), given]
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.Dropout2d(0.1), nn.InstanceNorm2d(after), nn.LeakyReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Five levels down and up, `blocks` in each, the first one `width` wide; every level up halves
    the channels and reads the one down beside it."""

    def __init__(self, blocks: int = 5, width: int = 64, depth: int = 5) -> None:
        super().__init__()
        wide = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(_level(a, b, b, blocks) for a, b in zip([3, *wide], wide, strict=False))
        self.middle = _level(wide[-1], 2 * wide[-1], wide[-1], blocks)
        self.up = nn.ModuleList(_level(2 * b, b // 2, b // 2, blocks) for b in reversed(wide))
        self.last = nn.Conv2d(width // 2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            skips.append(level(x))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for level in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = level(torch.cat([x, skips.pop()], 1))
        return self.last(x)


def _conv(taken: int, given: int, kernel: tuple[int, int] = (1, 1), stride: int = 1) -> list[nn.Module]:
    """Activation, convolution, normalisation."""
    padding = kernel[0] // 2, kernel[1] // 2
    return [nn.ReLU(), nn.Conv2d(taken, given, kernel, stride, padding, bias=False), nn.BatchNorm2d(given)]


class Halved(nn.Module):
    """Half the size: two 1x1 convolutions with stride 2, the second one pixel further."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(taken, given // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(taken, given // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(given)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(x)
        shifted = nn.functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))


def _none(width: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else Halved(width, width)


def _pool(kind: Callable[..., nn.Module], size: int) -> Callable[[int, int], nn.Module]:
    return lambda _width, stride: kind(size, stride, 0 if size == 2 else 1)


def _narrow(width: int, kernels: Sequence[tuple[int, int]], stride: int) -> nn.Module:
    """Convolutions on a quarter of the channels; the first of them has the stride, in its own direction."""
    layers = _conv(width, width // 4)
    for kernel in kernels:
        strides = (stride if kernel[0] > 1 else 1, stride if kernel[1] > 1 else 1)
        layers += [
            nn.ReLU(),
            nn.Conv2d(width // 4, width // 4, kernel, strides, (kernel[0] // 2, kernel[1] // 2), bias=False),
        ]
        layers += [nn.BatchNorm2d(width // 4)]
    return nn.Sequential(*layers, *_conv(width // 4, width))


OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": _none,
    "avg 3x3": lambda _width, stride: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
    "max 3x3": _pool(nn.MaxPool2d, 3),
    "max 2x2": _pool(nn.MaxPool2d, 2),
    "1x1": lambda width, stride: nn.Sequential(*_conv(width, width, stride=stride)),
    "3x3": lambda width, stride: _narrow(width, [(3, 3)], stride),
    "1x7, 7x1": lambda width, stride: _narrow(width, [(1, 7), (7, 1)], stride),
}

Cells = tuple[tuple[tuple[int, str], ...], tuple[int, ...]]
"""Pairs of (state, operation), whose sum is the next state; the states that make the output."""

NORMAL: Cells = (
    (
        (1, "1x1"), (1, "max 3x3"), (1, "none"), (0, "1x7, 7x1"), (0, "1x1"), (0, "1x7, 7x1"),
        (2, "max 3x3"), (2, "none"), (1, "avg 3x3"), (5, "1x1"),
    ),
    (0, 3, 4, 6),
)  # fmt: skip

REDUCTION: Cells = (
    (
        (0, "max 2x2"), (0, "max 3x3"), (2, "none"), (1, "3x3"), (2, "1x7, 7x1"), (2, "max 3x3"),
        (3, "none"), (1, "max 2x2"), (2, "avg 3x3"), (3, "1x1"),
    ),
    (4, 5, 6),
)  # fmt: skip


class Cell(nn.Module):
    """Reads the two cells before it. In a reduction, what reads these has stride 2."""

    def __init__(
        self, cells: Cells, before: int, last: int, width: int, *, after_reduction: bool, reduces: bool
    ) -> None:
        super().__init__()
        pairs, self.outputs = cells
        self.last = nn.Sequential(*_conv(last, width))
        self.before = (
            Halved(before, width)
            if after_reduction
            else nn.Sequential(*_conv(before, width))
            if before != width
            else nn.Identity()
        )
        self.states = tuple(state for state, _ in pairs)
        self.operations = nn.ModuleList(
            OPERATIONS[name](width, 2 if reduces and state < 2 else 1) for state, name in pairs
        )

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.last(last), self.before(before)]
        for k in range(0, len(self.states), 2):
            one, other = (self.operations[i](states[self.states[i]]) for i in (k, k + 1))
            states.append(one + other)
        return torch.cat([states[k] for k in self.outputs], 1)


class AmoebaNetD(nn.Module):
    """A stem, two reductions, then three times `layers` / 3 cells with a reduction in between; `width` is that of the last cells."""

    def __init__(self, layers: int = 18, width: int = 256, classes: int = 1000) -> None:
        super().__init__()
        now = width // 4
        self.stem = nn.Sequential(nn.Conv2d(3, now, 3, 2, 1, bias=False), nn.BatchNorm2d(now))
        before, last, after, cells = now, now, False, []
        groups = [0, 0, layers // 3, layers // 3, layers // 3]
        for place, group in enumerate(groups):
            for _ in range(group):
                cells.append(Cell(NORMAL, before, last, now, after_reduction=after, reduces=False))
                before, last, after = last, len(NORMAL[1]) * now, False
            if place < 4:
                now *= 2
                cells.append(Cell(REDUCTION, before, last, now, after_reduction=after, reduces=True))
                before, last, after = last, len(REDUCTION[1]) * now, True
        self.cells = nn.ModuleList(cells)
        self.head = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.head(last.mean((2, 3)))
