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
    "hsdp, by stage",
    "initialised llama",
    "overlapped, hsdp",
    "overlapped, parts",
    "resumed unet",
    "scaler of parts",
    "sums on four",
    "tied, by stage",
)
