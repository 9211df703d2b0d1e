"""The expected results of the cases of overlaps.py: per step, what each pipeline device does. "2B0" is a backward, "[14]" a bucket of
14 numbers whose reduction starts.

A layer has 9 weights and 3 biases, and a flag for each of the two parameters says whether it has a gradient. A bucket of sharded
parameters has a padded row per rank. In the last step layer 2 is frozen. "shared": the bias of the first layer is tied to another
rank, so it is in the last bucket, with unused parameters. "hsdp": there is one device; every bucket goes through both groups.
"""

from __future__ import annotations

ROWS: dict[str, tuple[tuple[str, ...], ...]] = {
    "overlapped": (
        ("2B0 2B1 0B0 0B1 2B2 2B3 [14] 0B2 0B3 [14]", "3B0 3B1 1B0 1B1 3B2 3B3 [14] 1B2 1B3 [14]"),
        (
            "2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1 2I2 2W2 2I3 2W3 [14] 0I2 0W2 0I3 0W3 [14]",
            "3I0 3I1 3W0 1I0 3W1 1I1 1W0 3I2 1W1 3I3 3W2 1I2 3W3 [14] 1I3 1W2 1W3 [14]",
        ),
        (
            "2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3 [14]",
            "3I0 3I1 3W0 1I0 3W1 1I1 1W0 3I2 1W1 3I3 3W2 1I2 3W3 [14] 1I3 1W2 1W3 [14]",
        ),
    ),
    "overlapped, shared": (
        ("2B0 2B1 0B0 0B1 2B2 2B3 [4] 0B2 0B3 [10] [10]", "3B0 3B1 1B0 1B1 3B2 3B3 [10] 1B2 1B3 [14]"),
        ("2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3 [10] [10]", "3B0 3B1 1B0 1B1 3B2 3B3 [10] 1B2 1B3 [14]"),
    ),
    "overlapped, loss": (
        ("3I0 3I1 0I0 0W0 0I1 3W0 0W1 3W1 [28]", "2I0 1I0 2I1 1I1 1W0 2W0 1W1 [14] 2W1 [14]"),
        ("3I0 3I1 0I0 0W0 0I1 3W0 0W1 3W1 [28]", "2I0 1I0 2I1 1I1 1W0 2W0 1W1 [14] 2W1"),
    ),
    "overlapped, parts": (
        ("2B0 2B1 0B0 0B1 2B2 2B3 [20] 0B2 0B3 [20]", "3B0 3B1 1B0 1B1 3B2 3B3 [20] 1B2 1B3 [20]"),
        ("2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3 [20]", "3B0 3B1 1B0 1B1 3B2 3B3 [20] 1B2 1B3 [20]"),
    ),
    "overlapped, hsdp": (
        ("3B0 3B1 3B2 3B3 [20] 2B0 2B1 2B2 2B3 [20] 1B0 1B1 1B2 1B3 [20] 0B0 0B1 0B2 0B3 [20] [10] [10] [10] [10]",),
        ("3B0 3B1 3B2 3B3 [20] 2B0 2B1 2B2 2B3 1B0 1B1 1B2 1B3 [20] 0B0 0B1 0B2 0B3 [20] [10] [10] [10]",),
    ),
}
