"""The command group: which commands there are, and how errors become messages and exit statuses."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Never

import click

from tpukern import environment
from tpukern.cli.groups import Group, print_help
from tpukern.cli.output import Output
from tpukern.errors import TpukernError
from tpukern.version import __version__

COMMANDS = {  # name -> module that holds the command, under its own name with "_command"
    "doctor": "tpukern.cli.doctor",
    "list": "tpukern.cli.listing",
    "show": "tpukern.cli.show",
    "compile": "tpukern.cli.compile",
    "verify": "tpukern.cli.verify",
    "mutate": "tpukern.cli.mutate",
    "estimate": "tpukern.cli.estimate",
    "tune": "tpukern.cli.tune",
    "records": "tpukern.cli.records",
    "report": "tpukern.cli.report",
    "trace": "tpukern.cli.report",
    "port": "tpukern.cli.port",
    "run": "tpukern.cli.run",
    "cache": "tpukern.cli.cache",
}

WITH_DEVICE = frozenset({"run", "doctor"})
FAILED, USAGE, INTERRUPTED = 1, 2, 130


class Commands(Group):
    """The group whose commands load on first use, and which owns the way out of the process.

    A command returns its exit status, or a function to call once click is out of the way (`run`, whose script's own
    exceptions must pass through as they are).
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = COMMANDS.get(cmd_name)
        return None if home is None else getattr(importlib.import_module(home), f"{cmd_name}_command")

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> int:
        words = list(sys.argv[1:] if args is None else args)
        output = Output(as_json=wants_json(words))
        with output.guarded():
            status = self._run(words, output, extra)
        if callable(status):
            status = status()
        if standalone_mode:
            sys.exit(status)
        return status

    def _run(self, words: list[str], output: Output, extra: dict[str, Any]) -> int | Callable[[], int]:
        try:
            return super().main(words, "tpukern", standalone_mode=False, obj=output, **extra) or 0
        except click.UsageError as e:
            where = e.ctx.command_path if e.ctx else "tpukern"
            output.error(f"{where}: {sentence(e.format_message())} See '{where} --help'.")
            return USAGE
        except (TpukernError, click.ClickException) as e:
            output.error(str(e) if isinstance(e, TpukernError) else e.format_message())
            return FAILED
        except (click.Abort, KeyboardInterrupt):
            output.error("interrupted.")
            return INTERRUPTED
        except Exception as e:
            if sys.flags.dev_mode:
                raise
            output.error(
                f"{type(e).__name__}: {e}. This is a defect in tpukern; 'python -X dev -m tpukern.cli' with the same arguments "
                "shows where."
            )
            return FAILED


def sentence(text: str) -> str:
    """Returns ``text`` as a sentence that begins in lower case, as all our messages do."""
    text = text[:1].lower() + text[1:]
    return text if text.endswith((".", "?")) else text + "."


def wants_json(words: Sequence[str]) -> bool:
    """Whether ``--json`` is among the command's own words: of ``run``, those before the script."""
    if not words or words[0] != "run":
        return "--json" in (words[: words.index("--")] if "--" in words else words)
    from tpukern.cli.run import run_command

    valued = {word for p in run_command.params if isinstance(p, click.Option) and not p.is_flag for word in p.opts}
    rest = iter(words[1:])
    for word in rest:
        if word == "--json":
            return True
        if word == "--" or not word.startswith("-"):
            return False
        if word in valued:
            next(rest, None)
    return False


@click.group(
    cls=Commands, no_args_is_help=False, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="tpukern", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Write, check and compile TPU kernels for PyTorch, with or without a TPU."""
    print_help(ctx)


def main() -> Never:
    """Entry point of the console script."""
    if not WITH_DEVICE & set(sys.argv[1:2]):
        environment.leave_the_device_alone()  # else a file of kernels that imports torch would start it, in seconds
    cli.main()
    raise AssertionError("unreachable: cli.main() exits")
