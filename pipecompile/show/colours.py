"""The colours of all charts."""

from __future__ import annotations

from pipecompile.ir import Kind

__all__ = ["COPY", "FAINT", "FILLS", "INK", "SHADES"]

SHADES = {
    Kind.FORWARD: ("#8fbbea", "#5f95d6", "#3f72b5", "#2b5488"),
    Kind.RECOMPUTE: ("#c9c3e8", "#a79fd6", "#8479bd", "#61569a"),
    Kind.BACKWARD: ("#f4c283", "#e79d4d", "#c97d2f", "#9c5e1f"),
    Kind.INPUT_GRAD: ("#f0d888", "#e2c157", "#c3a138", "#977b24"),
    Kind.WEIGHT_GRAD: ("#a5d3a0", "#79b873", "#579952", "#3e7439"),
    Kind.OFFLOAD: ("#e3b7c4", "#cf8ba0", "#b0647c", "#85465a"),
    Kind.RELOAD: ("#9fd0d0", "#6fb3b3", "#4d9292", "#356c6c"),
    Kind.UNSHARD: ("#cfd8dc", "#b0bec5", "#90a4ae", "#607d8b"),
    Kind.RESHARD: ("#e6e1d6", "#cfc7b4", "#b3a98f", "#857b60"),
    Kind.REDUCE_GRAD: ("#d7ccc8", "#bcaaa4", "#a1887f", "#6d4c41"),
}
"""Per kind four shades, light to dark, for the first, second, third and every further stage on one device."""

FILLS = ("#dbe8f8", "#fbe6cd", "#dff0dc", "#f6dfe3", "#e8e2f4", "#faf3cf", "#d9f0f0", "#ececec")
"""Background colours of stages, repeated in this order."""

COPY, INK, FAINT = "#7d838c", "#2b2f36", "#d9dce1"
