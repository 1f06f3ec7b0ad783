"""``tpukern show``: one kernel at one stage of its way to the chip."""

from typing import TYPE_CHECKING, Any

import click

from tpukern.cli.names import find_kernel, find_targets
from tpukern.cli.output import Output, json_option
from tpukern.cli.points import Choice, choice_of, choice_options, points
from tpukern.errors import ConfigError, TpukernError

if TYPE_CHECKING:
    from tpukern.cli.points import Point
    from tpukern.dsl.ir import PallasCall

STAGES = ("helion", "bound", "pallas", "mosaic", "stablehlo")
DEFAULT_TARGET = "v5e"


@click.command("show")
@click.argument("kernel")
@click.option("--target", default=DEFAULT_TARGET, show_default=True, metavar="NAME", help="One chip.")
@click.option("--stage", type=click.Choice(STAGES), default="bound", show_default=True, help="What to show.")
@choice_options(one=True)
@json_option
@click.pass_obj
def show_command(output: Output, kernel: str, target: str, stage: str, **chosen: Any) -> int:
    """Show KERNEL at one stage: helion, bound, pallas, mosaic or stablehlo.

    helion: of a Helion kernel, the code that Helion generates. bound: sizes, config, grid, blocks, scratch and VMEM
    estimate. pallas: each pallas_call with its body, as traced. mosaic: the text of each, as the TPU compiler gets it.
    stablehlo: the module around them. Without --workload it is the first workload, without --direction the forward.
    Neither a TPU nor libtpu is needed.
    """
    point = one_point(kernel, target, choice_of(**chosen))
    texts = stage_texts(point, stage)
    if not output.as_json:
        output.text("\n\n".join(texts))
        return 0
    assert point.bound is not None
    output.json(
        {
            "kernel": point.kernel.name,
            "direction": point.direction,
            "workload": point.workload.name,
            "dtype": point.workload.dtype,
            "target": point.target.name,
            "config": dict(point.bound.config),
            "stage": stage,
            "texts": list(texts),
        }
    )
    return 0


def one_point(name: str, target: str, choice: Choice) -> "Point":
    """Returns the first of the chosen points.

    Raises:
        ConfigError: Several targets are named.
        TpukernError: The kernel cannot be bound to those sizes.
    """
    targets = find_targets(target)
    if len(targets) > 1:
        raise ConfigError("show", f"{len(targets)} targets in {target!r}", "one")
    point = points([find_kernel(name)], targets, choice)[0]
    if point.error is not None:
        raise point.error
    return point


def stage_texts(point: "Point", stage: str) -> tuple[str, ...]:
    """Returns the text of the stage; of pallas and mosaic one for each pallas_call."""
    from tpukern.lowering import lower

    bound = point.bound
    assert bound is not None
    if stage == "helion":
        form = bound.kernel.helion
        if form is None:
            found = f"its frontend is {bound.kernel.frontend}"
            raise ConfigError(bound.kernel.name, found, "a kernel of the Helion frontend for the stage helion")
        return (form.source(bound.signature, bound.config, point.target),)
    if stage in ("mosaic", "stablehlo"):
        lowered = lower(bound, point.target)
        return lowered.mosaic if stage == "mosaic" else (lowered.stablehlo,)
    try:
        return (bound.text(),) if stage == "bound" else tuple(map(pallas_text, bound.calls))
    except TpukernError:
        raise
    except Exception:
        lower(bound, point.target)  # the kernel's body raises: this says so, with its line
        raise


def pallas_text(call: "PallasCall") -> str:
    """Returns one pallas_call: its grid and blocks, then its body's jaxpr."""
    return f"{call.text()}\n\n{call.body.pretty_print(use_color=False)}"
