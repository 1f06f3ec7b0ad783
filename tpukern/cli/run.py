"""``tpukern run``: a PyTorch script on the ``tpu`` device, with tpukern's kernels in place of PyTorch's own."""

import builtins
import contextlib
import dataclasses
import importlib.machinery
import io
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpukern.cli.output import Output, json_option
from tpukern.errors import ConfigError, OverrideError

if TYPE_CHECKING:
    from tpukern.explanation import Explanation


def names(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Splits every ``a,b`` of a repeatable option."""
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--only", multiple=True, callback=names, metavar="NAMES", help="Enable these overrides and no others (a,b).")
@click.option("--off", multiple=True, callback=names, metavar="NAMES", help="Leave these overrides out (a,b).")
@click.option(
    "--opt-in", multiple=True, callback=names, metavar="NAMES", help="Also enable these opt-in overrides (a,b or all)."
)
@click.option(
    "--explain-json", type=click.Path(dir_okay=False), metavar="FILE", help="Write the explanation's rows to FILE, as JSON."
)
@json_option
@click.pass_obj
def run_command(
    output: Output,
    script: str,
    arguments: tuple[str, ...],
    only: tuple[str, ...],
    off: tuple[str, ...],
    opt_in: tuple[str, ...],
    explain_json: str | None,
) -> Callable[[], int]:
    """Run a PyTorch script with the tpu device and the overrides enabled.

    The device is set up before torch is imported. SCRIPT runs as it would under python: as __main__, with its own
    arguments, and with its folder first on sys.path. At its end a table on stderr says which kernels ran, and why the
    others did not. The exit status, and any exception, are the script's own.

    Options of tpukern come before SCRIPT; what follows it belongs to the script. With --json the script's own stdout
    goes to stderr.
    """
    import tpukern

    program = read_program(script)
    check_writable(explain_json)
    device = tpukern.enable(only=only or None, off=off or None, opt_in="all" if "all" in opt_in else opt_in)
    return ScriptRun(program=program, arguments=arguments, device=device, explain_json=explain_json, output=output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A script, read but not compiled.

    Attributes:
        name: As the user named it: ``sys.argv[0]``.
        path: The file, absolute: ``__file__``.
        folder: What goes first on ``sys.path``.
        source: Its bytes.
    """

    name: str
    path: str
    folder: str
    source: bytes


def read_program(script: str) -> Program:
    """Reads the script, or the ``__main__.py`` of a folder.

    Raises:
        ConfigError: It cannot be read.
    """
    path = os.path.join(os.getcwd(), script)  # as python has it: not normalised
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        path, folder = os.path.join(path, "__main__.py"), path
    try:
        with io.open_code(path) as file:
            return Program(name=script, path=path, folder=folder, source=file.read())
    except OSError as e:
        rule = "a Python script, or a folder with a __main__.py"
        raise ConfigError("run", f"cannot read {script!r}: {e.strerror}", rule) from e


def check_writable(path: str | None) -> None:
    """Refuses, before the script has run for an hour, a file that could not be written after it."""
    if path is None:
        return
    try:
        with open(path, "a"):
            pass
    except OSError as e:
        found = f"--explain-json {path!r} cannot be written: {e.strerror}"
        raise ConfigError("run", found, "a file in a folder that exists") from e


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """The script's run, called once click is out of the way: its exceptions leave this process as they are."""

    program: Program
    arguments: tuple[str, ...]
    device: str
    explain_json: str | None
    output: Output

    def __call__(self) -> int:
        stdout = self._own_stdout() if self.output.as_json else None
        status, told = 1, False
        try:
            self._execute()
            status = 0
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else int(e.code is not None)
            raise
        except KeyboardInterrupt:
            status = 130
            raise
        finally:
            told = self._explain(status, stdout)
        return 0 if told else 1

    def _own_stdout(self) -> io.TextIOBase:
        """Keeps stdout for the result, and sends what the script and its children write there to stderr."""
        sys.stdout.flush()
        kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        return kept

    def _execute(self) -> None:
        sys.argv[:] = [self.program.name, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = self.program.folder
        main = types.ModuleType("__main__")
        loader = importlib.machinery.SourceFileLoader("__main__", self.program.path)
        vars(main).update(__file__=self.program.path, __cached__=None, __loader__=loader)
        vars(main).update(__builtins__=builtins, __annotations__={})
        sys.modules["__main__"] = main
        try:
            exec(compile(self.program.source, self.program.path, "exec", dont_inherit=True), vars(main))
        except BaseException:
            show_only_frames_below(self._execute.__code__)
            raise

    def _explain(self, status: int, stdout: io.TextIOBase | None) -> bool:
        """Says what ran; returns whether it could. A failure in here must not hide the script's own."""
        import tpukern

        explanation = tpukern.explain()
        rows = rows_of(explanation)
        try:
            with contextlib.suppress(ValueError, AttributeError):  # the script closed or replaced its stdout
                sys.stdout.flush()
            if self.explain_json is not None:
                Path(self.explain_json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
            if stdout is None:
                self.output.note(str(explanation))
                return True
            with stdout:
                told = {"device": self.device, "status": status, "explain": rows, "left_out": dict(explanation.left_out)}
                stdout.write(json.dumps(told, indent=2) + "\n")
            return True
        except OSError as e:
            self.output.note(str(OverrideError("explain", f"cannot write the explanation: {e}", "a place that can be written")))
            return False


def rows_of(explanation: "Explanation") -> list[dict[str, Any]]:
    """Returns the rows as JSON takes them."""
    return [json.loads(json.dumps(dataclasses.asdict(row), default=str)) for row in explanation.rows]


def show_only_frames_below(code: types.CodeType) -> None:
    """Makes the interpreter's last words about an exception begin at the script, as python's own would."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        frame = trace
        while frame is not None and frame.tb_frame.f_code is not code:
            frame = frame.tb_next
        below = trace if frame is None else frame.tb_next
        shown(kind, value.with_traceback(below), below)

    sys.excepthook = hook
