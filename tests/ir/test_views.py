"""Views are registered by type or name; data without a formatter have no HTML form."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipecompile.errors import InputError
from pipecompile.ir import views
from pipecompile.ir.views import html_of, register_html, register_writer, writer_of


class Thing:
    pass


class Special(Thing):
    pass


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_FORMATTERS", {})
    monkeypatch.setattr(views, "_WRITERS", {})


def test_a_type_without_a_formatter_has_no_html() -> None:
    assert html_of(Thing()) is None


def test_the_last_formatter_of_a_type_counts_and_holds_for_that_type_alone() -> None:
    register_html(Thing, lambda _: "<i>")
    register_html(Thing, lambda _: "<b>")
    assert html_of(Thing()) == "<b>"
    assert html_of(Special()) is None


def test_a_view_that_is_not_registered_says_what_to_import() -> None:
    with pytest.raises(InputError, match=r"(?s)no trace.*import pipecompile\.show"):
        writer_of("trace")
    register_writer("trace", str)
    assert writer_of("trace")(1) == "1"


@pytest.mark.parametrize(
    "expression",
    [
        "pc.build_schedule('1f1b', 2, 2)",
        "pc.Schedule.from_csv('0F0,0B0\\n')",
        "pc.simulate(pc.build_schedule('1f1b', 2, 2))",
    ],
)
def test_importing_pipecompile_alone_gives_pictures_in_a_notebook(expression: str) -> None:
    code = f"import pipecompile as pc; assert '<svg' in ({expression})._repr_html_()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_data_imported_from_ir_alone_show_their_repr() -> None:
    code = "from pipecompile.ir import Schedule; assert Schedule.from_csv('0F0')._repr_html_() is None"
    subprocess.run([sys.executable, "-c", code], check=True)
