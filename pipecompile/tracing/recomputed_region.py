"""A call of `torch.utils.checkpoint` in the user's model, as a fact of the nodes that were recorded inside the call.

    y = checkpoint(block, x, use_reentrant=False)      linear, relu, dropout: each node has the same RecomputedRegion

Nodes stay in one flat graph, which may be cut anywhere. The code of a graph runs consecutive nodes of a region under
`torch.utils.checkpoint` again (`emit/region_graphs.py`): a region that a cut divides becomes one region per stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipecompile.tracing.ambient_modes import Ambient

__all__ = ["RecomputedRegion"]


@dataclass(frozen=True, slots=True, eq=False)
class RecomputedRegion:
    """One call of `torch.utils.checkpoint` with gradients on. Two calls are never equal.

    parent       the region around this one; None for an outermost region
    ambient      grad mode and autocast at the call
    outside      grad mode and autocast around the recorded forward
    options      keywords of `torch.utils.checkpoint.checkpoint`, as (name, value)
    source       line of the user's code, as "file:line in function"
    is_divided   this is the part of the region in one stage, and other stages have others
    runs_to_end  a recomputation of the whole region runs all of this part again
    """

    parent: RecomputedRegion | None
    ambient: Ambient
    outside: Ambient
    options: tuple[tuple[str, Any], ...]
    source: str = ""
    is_divided: bool = False
    runs_to_end: bool = False

    @property
    def path(self) -> tuple[RecomputedRegion, ...]:
        """The regions around this one, the outermost first, and this one."""
        return (*self.parent.path, self) if self.parent else (self,)

    def option(self, name: str) -> Any:
        """Return one keyword of the call; None if it has none of this name."""
        return dict(self.options).get(name)

    @property
    def is_reentrant(self) -> bool:
        """Whether the user asked for the variant with reentrant autograd."""
        return bool(self.option("use_reentrant"))

    @property
    def keeps_draws(self) -> bool:
        """Whether a recomputation draws the random numbers of its forward again, here or in a region around."""
        return any(region.option("preserve_rng_state") for region in self.path)

    @property
    def is_selective(self) -> bool:
        """Whether the user's `context_fn` decides what is recomputed, here or in a region around."""
        return any(region.option("context_fn") is not None for region in self.path)
