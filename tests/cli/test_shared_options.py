"""Shared options are parameters of every command that takes their dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from pipecompile.cli.shared_options import spread


@dataclass(frozen=True)
class Pair:
    left: Annotated[str, typer.Argument(metavar="LEFT")]
    right: Annotated[int, typer.Option("--to-the-right", help="a number")] = 7


def test_fields_are_options_and_arrive_as_the_dataclass():
    got = []
    app = typer.Typer()

    @app.command()
    @spread
    def command(pair: Pair, loud: Annotated[bool, typer.Option(help="shout")] = False) -> None:
        """What it does."""
        got.append((pair, loud))

    def run(*words):
        return CliRunner().invoke(app, words)

    assert run("a").exit_code == run("b", "--to-the-right", "3", "--loud").exit_code == 0
    assert got == [(Pair("a"), False), (Pair("b", 3), True)]
    shown = run("--help").stdout
    assert all(text in shown for text in ("LEFT", "--to-the-right", "a number", "default: 7", "shout", "What it does."))
    assert run().exit_code == 2
    assert run("a", "--to-the-right", "x").exit_code == 2
