"""Cases of the ranks that run with `--full` alone: the same as others, with another model. This module imports nothing, as pytest imports it."""

FULL_ONLY = (
    "deep looped",
    "deep plain",
    "deep vee",
    "direct emulated looped",
    "direct listed",
    "direct looped",
    "direct mixed",
    "direct scaler",
    "direct tied on four",
    "direct vee",
    "further losses on sharded weights",
    "hsdp, by stage",
    "initialised llama",
    "overlapped, hsdp",
    "overlapped, parts",
    "resharded under limits",
    "resumed unet",
    "scaler of parts",
    "sums on four",
    "tied, by stage",
)
