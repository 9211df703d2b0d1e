"""The text form parses back; damage and faults are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from partitioners.oracle import problems

from pipecompile.errors import PartitionError, VerifyError
from pipecompile.partitioners import Node, Problem, Shared, Tensor, verify_problem

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
        ('{"nodes": [], "format": "pipecompile.problem/2"}', "pipecompile.problem/2"),
        ('{"nodes": [], "in_fligth": [1, 2]}', "in_fligth"),
    ],
)
def test_damage_is_located(text, part, tmp_path):
    path = tmp_path / "damaged.json"
    path.write_text(text)
    with pytest.raises(PartitionError) as caught:
        Problem.load(path)
    assert part in str(caught.value)
    assert str(path) in caught.value.where


def test_a_missing_file_is_a_partition_error(tmp_path):
    with pytest.raises(PartitionError, match="cannot be read"):
        Problem.load(tmp_path / "none.json")


def test_verify_reports_all_faults_at_once():
    broken = replace(
        CHAIN,
        nodes=(*CHAIN.nodes, Node("a", -1.0), Node("d", float("nan")), Node("e", 1.0, forward=2.0)),
        precedence=(*CHAIN.precedence, ("c", "a"), ("x", "a")),
        tensors=(Tensor("a", (), 1.0), Tensor("b", ("b",), 1.0, -1.0), Tensor("y", ("c", "c"), float("inf"))),
        groups=(("a", "z"),),
        memory_limit=(1.0, 2.0),
        in_flight=(1.0, 1.0, -1.0),
        speed=(1.0, 0.0),
        links=((1.0, -1.0),),
        shared=(Shared(("a", "s"), -2.0), Shared(())),
        pins={"p": 1},
        apart=(("b", "b"),),
        name="mine",
    )
    with pytest.raises(VerifyError) as caught:
        verify_problem(broken)
    text = str(caught.value)
    for part in (
        "'mine' is not legal: 23 faults",
        "node 'a' appears 2 times",
        "precedence 3 names 'x'",
        "tensor 2 names 'y'",
        "group 0 names 'z'",
        "tensor 0 from 'a' has no consumer",
        "tensor 1 from 'b' is consumed by its own source",
        "names its consumer 'c' 2 times",
        "time of node 'a' is -1.0",
        "time of node 'd' is nan",
        "time of tensor 2 from 'y' is inf",
        "in_flight of stage 2 is -1.0",
        "speed of stage 1 is 0",
        "forward of node 'e' is 2, expected at most its time, 1",
        "bytes of tensor 1 from 'b' is -1.0",
        "links from device 0 to 1 is -1.0",
        "links has 1 row,",
        "shared 0 names 's'",
        "shared 1 has no node",
        "bytes of shared 0 is -2.0",
        "pins names 'p'",
        "apart 0 names 'b' twice",
        "memory_limit has 2, speed has 2, links has 1, in_flight has 3",
        "a -> b -> c -> a",
    ):
        assert part in text
    assert len(caught.value.faults) == 23
