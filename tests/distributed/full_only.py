"""Cases of the ranks that run with `--full` alone: the same as others, with another model. This module imports nothing, as pytest imports it."""

FULL_ONLY = (
    "deep plain",
    "deep looped",
    "deep vee",
    "initialised llama",
    "resumed unet",
    "direct emulated looped",
    "direct listed",
    "direct tied on four",
    "sums on four",
    "hsdp, by stage",
    "tied, by stage",
)
