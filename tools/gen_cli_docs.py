"""Writes docs/cli.md from the click commands, so that the two cannot disagree.

python tools/gen_cli_docs.py            writes docs/cli.md
python tools/gen_cli_docs.py --check    exits with 1 if it is not current
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from tpukern.cli import cli

PATH = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

HEAD = """\
<!-- Written by tools/gen_cli_docs.py from the commands themselves; a test compares them. -->

# The `tpukern` command

{summary}

Every command takes `--json`: stdout then carries one JSON value and nothing else. Tables and results go to stdout, progress
and notes to stderr. The exit status is 0 only if all went well, 1 if something failed, 2 if the command line itself is
wrong, 130 after an interrupt. What fails says so in one message on stderr, or as `{{"error": "..."}}` with `--json`:

    $ tpukern show rms_nrm
    error: kernel[config]: no kernel 'rms_nrm'; expected one of [...], FILE.py:NAME or MODULE:NAME. Did you mean 'rms_norm'.

`python -m tpukern.cli` is the same command.
"""


def document() -> str:
    """Returns the whole text of docs/cli.md."""
    context = click.Context(cli, info_name="tpukern")
    sections = [HEAD.format(summary=inspect.cleandoc(cli.help or ""))]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None, f"{name} is listed and not there"
        sections.extend(describe(command, f"tpukern {name}"))
    return "\n".join(sections)


def describe(command: click.Command, path: str) -> Iterator[str]:
    """Yields the section of one command, then those of its subcommands."""
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield f"## {path}\n\n{inspect.cleandoc(command.help or '')}\n\n    {usage}\n"
    options = [p for p in command.get_params(context) if isinstance(p, click.Option) and "--help" not in p.opts]
    if options:
        yield "| option | meaning |\n|---|---|\n" + "\n".join(row(option, context) for option in options) + "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, f"{name} is listed and not there"
            yield from describe(inner, f"{path} {name}")


def row(option: click.Option, context: click.Context) -> str:
    """Returns the table row of one option."""
    if option.is_flag:
        value = ""
    elif isinstance(option.type, click.Choice):
        value = " " + "\\|".join(option.type.choices)
    else:
        value = f" {option.metavar or option.type.name.upper()}"
    notes = ["required"] if option.required else []
    if option.show_default and option.default is not None:
        notes.append(f"default {option.default}")
    noted = f" ({', '.join(notes)})" if notes else ""
    return f"| `{', '.join(option.opts)}{value}` | {option.help or ''}{noted} |"


def main() -> int:
    text = document()
    if "--check" not in sys.argv[1:]:
        PATH.write_text(text, encoding="utf-8")
        return 0
    if PATH.is_file() and PATH.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PATH.name} is not what the commands say; run: python tools/gen_cli_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
