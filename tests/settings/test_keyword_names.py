from __future__ import annotations

import inspect

import pytest
from torch import nn

import pipecompile as pc
from pipecompile.errors import KeywordError
from pipecompile.settings.keyword_names import _SUGGESTED


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("chunks", "n_microbatches="),
        ("num_stages", "n_stages="),
        ("criterion", "loss_fn="),
        ("n_microbatch", "n_microbatches="),
        ("amp", "torch.autocast"),
        ("zzz", "pc.compile(model, 4, example_args=(x,))"),
    ],
)
def test_a_keyword_that_there_is_not_is_told_the_one_that_is_meant(keyword: str, words: str) -> None:
    with pytest.raises(KeywordError) as caught:
        pc.compile(nn.Linear(2, 2), 2, **{keyword: 4})  # type: ignore[arg-type]
    assert f"compile has no keyword {keyword!r}" in str(caught.value)
    assert words in str(caught.value)


def test_a_call_without_a_number_of_stages_is_an_input_error_and_a_type_error() -> None:
    for kind in (pc.InputError, TypeError):
        with pytest.raises(kind, match=r"(?s)missing a required argument: 'n_stages'.*pc.compile"):
            pc.compile(nn.Linear(2, 2))  # type: ignore[call-arg]


def test_suggestions_are_keywords_and_their_synonyms_are_none() -> None:
    keywords = set(inspect.signature(pc.compile).parameters)
    assert set(_SUGGESTED.values()) <= keywords
    assert not keywords & set(_SUGGESTED)
