"""The facts of a report about the place where a step ran."""

from __future__ import annotations

import platform

import torch

from pipecompile.driver.run_environment import environment_facts, throughput


def test_versions_and_threads_are_those_of_this_process() -> None:
    facts = dict(environment_facts(("cpu", "cpu")))
    assert list(facts) == ["torch", "Python", "threads of torch"]
    assert facts["torch"] == torch.__version__
    assert facts["Python"].startswith(platform.python_version())
    assert facts["threads of torch"].startswith(f"{torch.get_num_threads()} on ")


def test_throughput_is_samples_by_seconds() -> None:
    assert dict(throughput(64, 0.5)) == {"samples per second, measured": "128 (64 in a step)"}
    assert not list(throughput(None, 0.5))
    assert not list(throughput(64, 0.0))
