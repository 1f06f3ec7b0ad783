"""``tpukern cache``: where compiled kernels are kept, how much there is, and clearing it."""

import contextlib
from typing import Any

import click

from tpukern.cli.groups import Group, print_help
from tpukern.cli.output import Output, json_option, mebibytes
from tpukern.errors import ConfigError


def cache_facts() -> dict[str, Any]:
    """Returns what ``cache info`` and ``doctor`` say of the cache; ``problem`` is why results cannot be kept, or None."""
    from tpukern.cache import Cache

    cache = Cache()
    entries, size = cache.size()
    return {
        "path": str(cache.folder),
        "entries": entries,
        "bytes": size,
        "limit_bytes": cache.limit_bytes,
        "problem": cache.check(),
    }


@click.group("cache", cls=Group, no_args_is_help=False, invoke_without_command=True)
@click.pass_context
def cache_command(ctx: click.Context) -> None:
    """The compiled kernels kept on disk: info, path, clear."""
    print_help(ctx)


@cache_command.command("info")
@json_option
@click.pass_obj
def info(output: Output) -> int:
    """Say where the cache is, how much is in it, and whether it can be written."""
    facts = cache_facts()
    if output.as_json:
        output.json(facts)
    else:
        output.text(f"{facts['path']}: {used(facts)}" + (f"; {facts['problem']}." if facts["problem"] else ""))
    return 0 if facts["problem"] is None else 1


@cache_command.command("path")
@json_option
@click.pass_obj
def path(output: Output) -> int:
    """Print the cache folder."""
    from tpukern.cache import Cache

    folder = str(Cache().folder)
    output.json({"path": folder}) if output.as_json else output.text(folder)
    return 0


@cache_command.command("clear")
@json_option
@click.pass_obj
def clear(output: Output) -> int:
    """Remove every compiled kernel from the cache."""
    from tpukern.cache import Cache

    cache = Cache()
    entries, size = cache.size()
    folder = cache.folder / "compiled"
    for file in folder.glob("*/*"):
        try:
            file.unlink(missing_ok=True)
        except OSError as e:
            raise ConfigError("cache", f"{file} cannot be removed: {e.strerror}", "a cache folder that can be written") from e
    for inner in (*folder.glob("*"), folder):
        with contextlib.suppress(OSError):  # not there, or another process has just written to it
            inner.rmdir()
    if output.as_json:
        output.json({"path": str(cache.folder), "entries": entries, "bytes": size})
    else:
        output.text(f"removed {entries} results, {mebibytes(size)} MiB, from {cache.folder}")
    return 0


def used(facts: dict[str, Any]) -> str:
    """Returns in words how full the cache is."""
    return f"{facts['entries']} results, {mebibytes(facts['bytes'])} of {mebibytes(facts['limit_bytes'])} MiB"
