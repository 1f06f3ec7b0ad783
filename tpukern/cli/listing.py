"""``tpukern list``: the kernels that ship, or those of a file or module."""

from typing import TYPE_CHECKING, Any

import click

from tpukern import helion_adapter
from tpukern.cli.names import shipped
from tpukern.cli.output import Output, json_option
from tpukern.targets import TARGETS

if TYPE_CHECKING:
    from tpukern.dsl import Kernel

HEADINGS = ("name", "op", "frontend", "dtypes", "directions", "overrides", "workloads", "targets")


@click.command("list")
@json_option
@click.pass_obj
def list_command(output: Output) -> int:
    """List the kernels that ship with tpukern."""
    rows = [describe(kernel) for kernel in shipped().values()]
    if output.as_json:
        output.json(rows)
        return 0
    output.table(HEADINGS, [cells(row) for row in rows])
    lacking = helion_adapter.missing()
    if lacking is not None and any(row["frontend"] == "helion" for row in rows):
        output.note(f"The kernels of the frontend helion cannot run here: {lacking}. {helion_adapter.INSTALL}")
    output.note("* opt-in: enabled by 'tpukern run --opt-in NAME' or tpukern.enable(opt_in=...) only.")
    return 0


def describe(kernel: "Kernel") -> dict[str, Any]:
    """Returns what ``list --json`` says of a kernel."""
    return {
        "name": kernel.name,
        "op": kernel.op,
        "frontend": kernel.frontend,
        "dtypes": list(kernel.dtypes),
        "directions": list(kernel.directions),
        "overrides": [{"op": o.op, "keys": list(o.keys), "opt_in": o.opt_in} for o in kernel.overrides],
        "workloads": [
            {"name": w.name, "dtype": w.dtype, "directions": list(w.directions), "values": dict(w.values), "source": w.source}
            for w in kernel.workloads
        ],
        "targets": targets_of(kernel),
    }


def targets_of(kernel: "Kernel") -> list[str]:
    """Returns the targets that ``reject`` leaves a config for, at one of the workloads at least."""
    if kernel.reject is None or not kernel.workloads:
        return list(TARGETS)
    signatures = [kernel.workload_signature(w) for w in kernel.workloads]
    return [name for name, target in TARGETS.items() if any(kernel.configs(s, target) for s in signatures)]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    overrides = "\n".join(o["op"] + ("*" if o["opt_in"] else "") for o in row["overrides"])
    workloads = "\n".join(w["name"] for w in row["workloads"])
    lists = (", ".join(row["dtypes"]), ", ".join(row["directions"]))
    return row["name"], row["op"] or "-", row["frontend"], *lists, overrides or "-", workloads or "-", ", ".join(row["targets"])
