"""The text form parses back; damage and faults are named."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from partitioners.oracle import problems

from pipecompile.errors import InfeasibleError, PartitionError
from pipecompile.partitioners import Node, Problem, Tensor, partition, verify_problem

REFERENCE = sorted((Path(__file__).parent / "reference").glob("*.json"))
CHAIN = Problem(
    (Node("a", 1.0), Node("b", 2.0), Node("c", 3.0)),
    precedence=(("a", "b"), ("b", "c")),
    tensors=(Tensor("a", ("b",), 0.5), Tensor("b", ("c", "a"), 0.25)),
)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_text_form_parses_back(case):
    problem, _ = case
    verify_problem(problem)
    assert Problem.from_json(problem.to_json()) == problem


@pytest.mark.parametrize("number", [np.float32, np.int64, Fraction])
def test_numbers_of_other_types_are_written_and_solved_as_those_of_python(number):
    problem = replace(CHAIN, nodes=(Node("a", number(1)), Node("b", number(2))), precedence=(), tensors=(),
                      memory_limit=number(9), speed=(number(1), number(2)), pins={"a": 0})  # fmt: skip
    assert Problem.from_json(problem.to_json()) == problem.plain() == problem
    assert all(type(value) is not number for value in (problem.plain().memory_limit, problem.plain().nodes[0].time))
    assert CHAIN.plain() is CHAIN
    assert partition(problem, 2).bottleneck == 1.0
    with pytest.raises(InfeasibleError, match="largest limit is 1 byte\\n"):
        partition(replace(problem, nodes=(Node("a", 1.0, bytes=2.0),), memory_limit=number(1)), 2)


@pytest.mark.parametrize("path", REFERENCE, ids=lambda path: path.stem)
def test_reference_files_load_are_legal_and_survive_a_save(path, tmp_path):
    problem = Problem.load(path)
    verify_problem(problem)
    assert problem.name == path.stem
    assert len(problem.nodes) > 30
    problem.save(tmp_path / "again.json")
    assert Problem.load(tmp_path / "again.json") == problem


def test_the_json_keys_are_those_of_the_format():
    text = CHAIN.to_json()
    assert '"from": "b"' in text
    assert '"to": [' in text
    assert '"format": "pipecompile.problem/1"' in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"nodes": [{"name": "a"}, {"name": "b", "time": "long"}]}', "$.nodes[1].time"),
        ('{"nodes": [{"time": 1}]}', "$.nodes[0]"),
        ('{"nodes": [], "tensors": [{"from": "a", "to": "b"}]}', "$.tensors[0].to"),
        ('{"nodes": [', "truncated"),
        ("[]", "Expected `object`"),
        ('{"a":' * 100_000, "recursion"),
        ('{"nodes": [], "format": "pipecompile.problem/2"}', "pipecompile.problem/2"),
        ('{"nodes": [], "in_fligth": [1, 2]}', "in_fligth"),
    ],
)
def test_malformed_text_is_located(text, part, tmp_path):
    path = tmp_path / "damaged.json"
    path.write_text(text)
    with pytest.raises(PartitionError) as caught:
        Problem.load(path)
    assert part in str(caught.value)
    assert str(path) in caught.value.where


def test_a_missing_file_is_a_partition_error(tmp_path):
    with pytest.raises(PartitionError, match="cannot be read"):
        Problem.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"nodes": [{"name": "a"}, {"name": "b", "tmie": 3}]}', "node 1 of the problem has unknown keys: \\['tmie'\\]\n.*\n?.*time"),
        ('{"nodes": [], "tensors": [{"from": "a", "to": ["b"], "size": 1}]}', "tensor 0 of the problem has unknown keys: \\['size'\\]"),
        ('{"nodes": [], "shared": [{"nodes": ["a"], "byte": 1}]}', "shared 0 of the problem has unknown keys: \\['byte'\\]"),
    ],
)  # fmt: skip
def test_unknown_keys_of_entries_are_refused(text: str, message: str) -> None:
    """A node with "tmie" had the time 0."""
    with pytest.raises(PartitionError, match=message):
        Problem.from_json(text)
