"""Where a command's words go: the result to stdout, everything else to stderr."""

import contextlib
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import click

UNLIMITED_COLUMNS = 4096  # a table that is piped is never wrapped


@final
class Output:
    """The two streams of one command.

    With ``--json`` stdout carries one JSON value and nothing else: whatever else Python code prints there (a user's
    kernel file, a library) is sent to stderr while the command runs.

    Attributes:
        as_json: The user asked for JSON.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._stdout = sys.stdout

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Keeps stdout for the result while the block runs, if that result is JSON; warnings become one line on stderr."""
        with contextlib.ExitStack() as undo:
            if self.as_json:
                undo.enter_context(contextlib.redirect_stdout(sys.stderr))
            undo.callback(setattr, warnings, "showwarning", warnings.showwarning)
            warnings.showwarning = self._warn
            yield

    def _warn(self, message: Warning | str, *where: object, **more: object) -> None:
        self.note(f"{click.style('warning:', fg='yellow')} {message}")

    def json(self, value: Any) -> None:
        """Writes the result as one JSON value on stdout."""
        click.echo(json.dumps(value, indent=2), file=self._stdout)

    def text(self, text: str = "") -> None:
        """Writes a line of the result on stdout."""
        click.echo(text, file=self._stdout)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """Writes a table on stdout; the columns named in ``right`` are aligned right."""
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
        for heading in headings:
            table.add_column(Text(heading), justify="right" if heading in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        width = None if self._stdout.isatty() else UNLIMITED_COLUMNS
        Console(file=self._stdout, width=width, highlight=False).print(table)

    def note(self, text: str = "") -> None:
        """Writes a line on stderr."""
        click.echo(text, err=True)

    def error(self, message: str) -> None:
        """Writes the message of a command that failed: on stderr, or as the JSON result if that was asked for."""
        if self.as_json:
            self.json({"error": message})
        else:
            click.echo(f"{click.style('error:', fg='red')} {message}", err=True)


def mebibytes(n: int | None) -> str:
    """Returns ``n`` bytes in MiB, or a dash."""
    return "-" if n is None else f"{n / 2**20:.2f}"


json_option = click.option(
    "--json", "as_json", is_flag=True, expose_value=False, help="Write the result as JSON on stdout, and nothing else there."
)
