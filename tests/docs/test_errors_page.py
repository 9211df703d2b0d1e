"""docs/errors.md: every code has a section, whose first example provokes it and whose second one is cured."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pipecompile as pc
from pipecompile.errors import CODES

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
TEXT = PAGE.read_text()
SECTIONS = {part.split("\n", 1)[0].strip(): part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]}
BLOCK = re.compile(r"^```python( setup)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def namespace(*blocks: str) -> dict[str, Any]:
    """Run blocks of the page as code of that file, at their own lines."""
    found: dict[str, Any] = {}
    source = [""] * TEXT.count("\n")
    for block in blocks:
        line = TEXT[: TEXT.index(block)].count("\n")
        source[line : line + block.count("\n")] = block.splitlines()
        linecache.cache[str(PAGE)] = len(TEXT), None, [f"{text}\n" for text in source], str(PAGE)
        exec(compile("\n" * line + block, str(PAGE), "exec"), found)
    return found


def examples(code: str) -> tuple[dict[str, Any], dict[str, Any]]:
    setup = next(text for label, text in BLOCK.findall(TEXT) if label)
    fails, cured = (text for _, text in BLOCK.findall(SECTIONS[code]))
    return namespace(setup, fails), namespace(setup, fails, cured)


def test_every_code_has_a_section_and_every_section_a_code():
    assert list(SECTIONS) == list(CODES)
    for code, section in SECTIONS.items():
        assert CODES[code].page == f"docs/errors.md#{code.lower()}"
        assert section


@pytest.mark.parametrize("code", [code for code in CODES if code not in ("PC103", "PC112")])
def test_the_first_example_fails_with_the_code(code):
    example, _ = examples(code)
    torch.manual_seed(0)
    found = pc.explain(example["model"], *example["args"])
    (failure,) = found.failures
    assert not found.traced
    assert failure.code == code
    assert failure.page in str(found)
    assert (failure.file == str(PAGE)) == (code not in ("PC106", "PC108", "PC109", "PC105"))
    if failure.file == str(PAGE):
        assert failure.source == TEXT.splitlines()[failure.line - 1].strip()
        assert failure.source in str(found)


def test_the_first_example_of_pc103_is_kept_whole():
    example, cured = examples("PC103")
    found = pc.explain(example["model"], *example["args"])
    assert found.traced
    assert [kept.code for kept in found.kept_whole] == ["PC103"]
    assert not pc.explain(cured["model"], *cured["args"]).kept_whole


@pytest.mark.parametrize("code", CODES)
def test_the_second_example_is_cured(code):
    _, example = examples(code)
    model, dims = example["model"], example.get("batch_dims", {})
    graph = pc.trace(model, *example["args"], batch_dims=dims)
    for args in (example["args"], example.get("later", example["args"])):
        expected, found = model(*args), graph(*args)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_part_that_breaks_its_promise_is_named_when_it_runs():
    example, _ = examples("PC112")
    pipe = pc.compile(example["model"], 2, example_args=example["args"], n_microbatches=1, cost="analytic")
    assert torch.equal(pipe(*example["args"]), example["model"](*example["args"]))
    with pytest.raises(pc.RunError) as caught:
        pipe(*example["later"])
    cause = caught.value.__cause__
    assert isinstance(cause, pc.TraceError)
    assert cause.code == "PC112"
    assert "getitem, kept whole" in str(caught.value)
    assert f"{PAGE.name}:" in str(caught.value)
