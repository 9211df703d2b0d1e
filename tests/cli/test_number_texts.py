"""Numbers as typed, and the file of bandwidths."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipecompile.cli.number_texts import bandwidths, numbers, sizes
from pipecompile.errors import InputError


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e308", "5e-324", "2GiB,", "1e308GB", "x"])
def test_a_size_that_is_none_is_refused_with_its_option(text: str) -> None:
    for read in (sizes, bandwidths):
        with pytest.raises(InputError, match=r"(?s)where  --option .*try"):
            read("--option", text)


def test_numbers_are_read_between_commas() -> None:
    assert numbers("--speeds", "1,.5", float) == [1.0, 0.5]
    assert (sizes("--memory-limit", "1KiB"), sizes("--memory-limit", "1KiB,2")) == (1024, [1024, 2])
    assert bandwidths("--bandwidth", "16GB/s") == 16_000_000_000


def test_a_file_of_bandwidths_may_have_the_mark_of_an_editor(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_bytes(b"\xef\xbb\xbf0,16GB\r\n\r\n1e9,0\r\n")
    assert bandwidths("--bandwidth", str(path)) == [[0, 16_000_000_000], [1_000_000_000, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the file of --bandwidth has no rows"),
        (b"0,1\n1\n", r"a row has 1 entry for 2 rows\n  where  .*links.csv, line 2"),
        (b"0,1\n\n1,fast\n", r"'fast' is not a size\n  where  .*links.csv, line 3, entry 2"),
        (b"\xff\xfe0,1", "cannot be read"),
        (b"0,\0\n0,0\n", "is not a size"),
    ],
)
def test_a_file_that_is_no_square_is_refused_with_its_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "links.csv"
    path.write_bytes(text)
    with pytest.raises(InputError, match=message):
        bandwidths("--bandwidth", str(path))
