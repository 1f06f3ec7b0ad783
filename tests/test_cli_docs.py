"""docs/cli.md says what the commands say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_document_is_current(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gen_cli_docs.py"), "--check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_command_and_option_is_in_the_document() -> None:
    import click

    from tpukern.cli import cli

    text = (ROOT / "docs" / "cli.md").read_text()
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        section = text.split(f"\n## tpukern {name}\n")[1].split(f"\n## tpukern {name} ")[0].split("\n## ")[0]
        for parameter in command.params:
            assert parameter.param_type_name != "option" or parameter.opts[0] in section, (name, parameter.opts)
