"""The functions of `torch.utils.checkpoint` that begin a region without reentrant autograd, and its switch for stopping early."""

from __future__ import annotations

from torch.utils import checkpoint

__all__ = ["REGION_GENERATORS", "StopRecomputation", "early_stop_override"]

REGION_GENERATORS = tuple(
    (module, name)
    for module in ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
    for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
)
"""(module, name) of generator functions: code before their `yield` runs before the region, code after it afterwards. The second
module need not be loaded. 2.11; the second name since 2.15."""


def early_stop_override() -> bool | None:
    """Return what `torch.utils.checkpoint.set_checkpoint_early_stop` has set; None outside of that. 2.11."""
    return checkpoint._enable_checkpoint_early_stop


StopRecomputation: type[Exception] = checkpoint._StopRecomputationError
"""The exception by which a hook of a checkpoint ends the recomputed forward early. 2.11."""
