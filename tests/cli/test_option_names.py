"""Who typed options reads options."""

from __future__ import annotations

import pytest

from pipecompile.cli.option_names import as_options


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ('try memory_limit=123, or checkpoint="auto": it fits, or n_stages=5',
         "try --memory-limit 123, or --checkpoint auto: it fits, or --stages 5"),
        ("memory_limit=(100, 200)", "--memory-limit 100,200"),
        ("tied='x' is not known", "--tied x is not known"),
        ("devices= with 4 entries", "--devices with 4 entries"),
        ("pin: nothing is called 'head'", "--pin: nothing is called 'head'"),
        ("speeds lists 2 of 4 devices", "--speeds lists 2 of 4 devices"),
        ("a larger time_limit, or more memory", "a larger --time-limit, or more memory"),
        ("--pin puts 'a' into stage 0", "--pin puts 'a' into stage 0"),
        ("the plan has 3 stages and the schedule of 2 devices another cost", None),
        ("my_n_stages=3 and --speeds", None),
    ],
)  # fmt: skip
def test_arguments_are_read_as_options(said, read):
    assert as_options(said) == (said if read is None else read)
