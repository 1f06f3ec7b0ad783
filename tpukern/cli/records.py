"""``tpukern records``: tuned configs on record: list, export, import, merge, diff."""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tpukern.cli.groups import Group, print_help
from tpukern.cli.output import Output, json_option
from tpukern.errors import RecordError

if TYPE_CHECKING:
    from tpukern.autotune.recording import Record

HEADINGS = ("layer", "target", "kernel", "sizes", "inputs", "config", "us", "default us", "source", "date")
RIGHT = ("us", "default us")
LAYER = click.option(
    "--layer", type=click.Choice(("user", "shipped")), default="user", show_default=True, help="Whose records."
)


@click.group("records", cls=Group, no_args_is_help=False, invoke_without_command=True)
@click.pass_context
def records_command(ctx: click.Context) -> None:
    """Tuned configs on record: list, export, import, merge, diff.

    'tpukern tune' writes the user's records; others ship with tpukern. Where no config is given, a call for a chip takes the
    user's record for its sizes, else the shipped one, else that of the nearest sizes, else the default: see docs/tune.md.
    """
    print_help(ctx)


@records_command.command("list")
@click.option("--kernel", metavar="NAME", help="One kernel's only.")
@click.option("--target", metavar="NAME", help="One chip's only.")
@json_option
@click.pass_obj
def list_records(output: Output, kernel: str | None, target: str | None) -> int:
    """List the records of both layers."""
    from tpukern.autotune import recalling, recording

    found = [
        (layer, record)
        for layer, folder in ((recalling.USER, None), (recalling.SHIPS, recording.SHIPPED))
        for record in recording.Store(folder).all()
        if kernel in (None, record.kernel) and target in (None, record.target)
    ]
    if output.as_json:
        output.json([{"layer": layer, **record.as_json()} for layer, record in found])
        return 0
    output.table(HEADINGS, [(layer, *cells(record)) for layer, record in found], right=RIGHT)
    output.note(f"{len(found)} records; the user's are in {recording.Store().folder}.")
    return 0


@records_command.command("export")
@click.argument("file", type=click.Path(path_type=pathlib.Path))
@LAYER
@json_option
@click.pass_obj
def export(output: Output, file: pathlib.Path, layer: str) -> int:
    """Write all records of one layer into FILE, for 'tpukern records import' elsewhere."""
    from tpukern.autotune import recording

    found = recording.Store(recording.SHIPPED if layer == "shipped" else None).all()
    write_bundle(file, found)
    output.json({"path": str(file), "records": len(found)}) if output.as_json else output.text(
        f"{len(found)} records written to {file}"
    )
    return 0


@records_command.command("import")
@click.argument("file", type=click.Path(path_type=pathlib.Path))
@json_option
@click.pass_obj
def import_records(output: Output, file: pathlib.Path) -> int:
    """Add the records in FILE, or in a folder of records, to the user's. Of two for one problem the better stays."""
    from tpukern.autotune import recording

    found, store = read_bundle(file), recording.Store()
    before = {record.problem: record for record in store.all()}
    store.add(found)
    after = {record.problem: record for record in store.all()}
    changed = sum(before.get(problem) != record for problem, record in after.items())
    told = {"path": str(store.folder), "read": len(found), "changed": changed}
    output.json(told) if output.as_json else output.text(
        f"{len(found)} records read, {changed} of them new or better than what {store.folder} had"
    )
    return 0


@records_command.command("merge")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=pathlib.Path))
@click.option("-o", "--output", "into", required=True, type=click.Path(path_type=pathlib.Path), help="The file to write.")
@json_option
@click.pass_obj
def merge(output: Output, files: Sequence[pathlib.Path], into: pathlib.Path) -> int:
    """Merge FILES, or folders of records, into one file. Of two records for one problem the better stays."""
    from tpukern.autotune import recording

    found = recording.merged(*(read_bundle(file) for file in files))
    write_bundle(into, found)
    output.json({"path": str(into), "records": len(found)}) if output.as_json else output.text(
        f"{len(found)} records written to {into}"
    )
    return 0


@records_command.command("diff")
@click.argument("old", type=click.Path(path_type=pathlib.Path))
@click.argument("new", type=click.Path(path_type=pathlib.Path))
@json_option
@click.pass_obj
def diff(output: Output, old: pathlib.Path, new: pathlib.Path) -> int:
    """Say what differs between two files, or folders, of records. The exit status is 1 if anything does."""
    before = {record.problem: record for record in read_bundle(old)}
    after = {record.problem: record for record in read_bundle(new)}
    rows = [
        difference(before.get(problem), after.get(problem))
        for problem in sorted({*before, *after})
        if before.get(problem) != after.get(problem)
    ]
    if output.as_json:
        output.json(rows)
    else:
        names = ("change", "target", "kernel", "sizes", "config", "us")
        output.table(names, [tuple(row[name] for name in names) for row in rows])
        output.note(f"{len(rows)} of {len({*before, *after})} records differ.")
    return 1 if rows else 0


def difference(old: "Record | None", new: "Record | None") -> dict[str, str]:
    """Returns one line of a diff."""
    shown = new or old
    assert shown is not None
    change = "changed" if old and new else "added" if new else "removed"
    configs = [config_text(record) for record in (old, new) if record is not None]
    times = [f"{record.us:,.1f} ({record.source})" for record in (old, new) if record is not None]
    return {
        "change": change,
        "target": shown.target,
        "kernel": shown.kernel,
        "sizes": sizes_text(shown),
        "config": " -> ".join(dict.fromkeys(configs)),
        "us": " -> ".join(dict.fromkeys(times)),
    }


def sizes_text(record: "Record") -> str:
    """Returns a record's sizes and static arguments."""
    return ",".join(f"{name}={value}" for name, value in {**record.sizes, **record.statics}.items())


def config_text(record: "Record") -> str:
    return ",".join(f"{key}={value}" for key, value in record.config.items())


def cells(record: "Record") -> tuple[str, ...]:
    default = "-" if record.default_us is None else f"{record.default_us:,.1f}"
    inputs = ",".join(dict.fromkeys(record.inputs))
    where = (record.target, record.kernel, sizes_text(record), inputs, config_text(record))
    return *where, f"{record.us:,.1f}", default, record.source, record.date


def read_bundle(path: pathlib.Path) -> "tuple[Record, ...]":
    """Reads a file that `export` or `merge` wrote, a file of one kernel, or a folder of those.

    Raises:
        RecordError: It is none, or cannot be read.
    """
    from tpukern.autotune import recording

    files = recording.Store(path).files() if path.is_dir() else [path]
    found: list[Any] = []
    for file in files:
        try:
            found += recording.parse(file.read_bytes())
        except (OSError, ValueError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
            wanted = "a file of 'tpukern records export', or a folder of records"
            raise RecordError(str(file), f"it cannot be read: {reason}", wanted) from error
    return tuple(found)


def write_bundle(path: pathlib.Path, records: "Sequence[Record]") -> None:
    """Writes records of any kernels and targets into one file.

    Raises:
        RecordError: It cannot be written.
    """
    from tpukern.autotune import recording

    try:
        recording.write(path, recording.text_of("all", "all", records))
    except OSError as error:
        raise RecordError(
            str(path), f"it cannot be written: {error.strerror or error}", "a place that can be written"
        ) from error
