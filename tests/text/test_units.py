"""Numbers for people, and back."""

from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.text.units import BYTES, COUNT, SECONDS, counted, fit, parse_bytes, written


@pytest.mark.parametrize(
    ("scale", "value", "text"),
    [
        (SECONDS, 0.0, "0 ns"),
        (SECONDS, 12.34e-3, "12.3 ms"),
        (SECONDS, 9.999e-3, "10.0 ms"),
        (SECONDS, 10.0, "10.0 s"),
        (SECONDS, 4e-7, "400 ns"),
        (BYTES, 17.0, "17 B"),
        (BYTES, 3 * 2.0**30, "3.00 GiB"),
        (BYTES, 5000 * 2.0**40, "5,000 TiB"),
        (COUNT, 25_557_032.0, "25.6 M"),
        (COUNT, 999.0, "999"),
    ],
)
def test_a_value_has_three_digits_and_its_unit(scale, value, text):
    assert written(scale, value) == text


def test_a_column_takes_unit_and_decimals_of_its_largest_value():
    values = [12.3e-3, 9e-3, 0.04e-3, 0.0]
    unit = fit(SECONDS, values)
    assert [unit.format(value, max(values)) for value in values] == ["12.3", "9.0", "0.0", "0"]


def test_small_values_beside_no_large_one_keep_their_digits():
    assert fit(SECONDS, [1.0]).format(0.0123) == "0.012"


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * 2**30), ("512 MB", 512_000_000), ("1.5g", 1_500_000_000), ("1e9", 10**9), ("7", 7), ("8kib", 8192)],
)
def test_sizes_are_read_back(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 iB", "2GiBs", "two"])
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(InputError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "stage", "1 stage"),
        (2, "stage", "2 stages"),
        (0, "device", "0 devices"),
        (0.5, "micro-batch", "0.5 micro-batches"),
    ],
)
def test_a_counted_noun_is_singular_or_plural(count: float, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_counts_have_all_digits_and_their_nouns_a_number() -> None:
    """Before, a million samples and more were written as 1.23457e+06."""
    assert [counted(n, "sample") for n in (0, 1, 2, 1_234_567)] == [
        "0 samples",
        "1 sample",
        "2 samples",
        "1234567 samples",
    ]
    assert [counted(n, "entry") for n in (1, 2)] == ["1 entry", "2 entries"]
    assert counted(0.5, "micro-batch") == "0.5 micro-batches"
