"""Error messages name options in place of keywords."""

from __future__ import annotations

import pytest

from pipecompile.cli.option_names import as_options


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ('try memory_limit=123, or checkpoint="auto": it fits, or n_stages=5',
         "try --memory-limit 123, or --checkpoint auto: it fits, or --stages 5"),
        ("memory_limit=(100, 200)", "--memory-limit 100,200"),
        ("bandwidth=[[0, 5], [1]] is not a square", "--bandwidth 0,5,1 is not a square"),
        ("pin={'4': 7, 'fc': 1} is not a stage: try pin={head: 1}", "--pin 4=7,fc=1 is not a stage: try --pin head=1"),
        ("n_slices must be a whole number: n_slices=0", "--slices must be a whole number: --slices 0"),
        ('dispatch="inline", or cuda_graphs=True', "--dispatch inline, or --cuda-graphs"),
        ("try offload=False, or cuda_graphs='step'", "try --no-offload, or --cuda-graphs-step"),
        ("tied='x' is not known", "--tied x is not known"),
        ("devices= with 4 entries", "--devices with 4 entries"),
        ("pin: nothing is called 'head'", "--pin: nothing is called 'head'"),
        ("speeds: no entry for 2 devices", "--speeds: no entry for 2 devices"),
        ("speeds=(1, 2) is not one entry per pipeline device: 2 for 3", "--speeds 1,2 is not one entry per pipeline device: 2 for 3"),
        ("a larger time_limit, or more memory", "a larger --time-limit, or more memory"),
        ("--pin puts 'a' into stage 0", "--pin puts 'a' into stage 0"),
        ("the plan has 3 stages and the schedule of 2 devices another cost", None),
        ("my_n_stages=3 and --speeds", None),
    ],
)  # fmt: skip
def test_arguments_are_read_as_options(said, read):
    assert as_options(said) == (said if read is None else read)
