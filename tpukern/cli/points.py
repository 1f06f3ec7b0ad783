"""The (kernel, direction, workload, target) points that ``show`` and ``compile`` work on."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tpukern.cli.names import find_dtype, find_workloads, known_keys, parse_shape
from tpukern.errors import ConfigError, TpukernError
from tpukern.targets import Target

if TYPE_CHECKING:
    from tpukern.dsl import Bound, Kernel, Workload

DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One thing to lower or compile.

    Attributes:
        kernel: The forward kernel.
        direction: "forward" or "backward".
        workload: The sizes.
        target: The chip.
        bound: The kernel of that direction bound to the sizes; None if it could not be.
        error: Why not.
    """

    kernel: "Kernel"
    direction: str
    workload: "Workload"
    target: Target
    bound: "Bound | None" = None
    error: TpukernError | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What the options of a command choose among a kernel's points.

    Attributes:
        workload: Name of one workload, or None for all.
        shape: Text of ``--shape``, or None.
        dtype: Element type, or None for the workload's own.
        config: Text of ``--config``, or None for the default config.
        direction: One direction, or None for all that the workload has.
    """

    workload: str | None = None
    shape: str | None = None
    dtype: str | None = None
    config: str | None = None
    direction: str | None = None


def choice_options(*, one: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds the options of a `Choice` to a click command.

    Args:
        one: The command takes the first of the chosen points, not all of them.
    """
    direction, workload = ("the forward", "the first") if one else ("both", "all of them")
    options = (
        click.option("--workload", metavar="NAME", help=f"A named workload; without it {workload}."),
        click.option("--shape", metavar="DIM=N,...", help="Sizes and static arguments, in place of a named workload."),
        click.option("--dtype", metavar="NAME", help="Element type, in place of the workload's own."),
        click.option("--config", metavar="K=V,...", help="Block sizes and choices; the default config fills in the rest."),
        click.option("--direction", type=click.Choice(DIRECTIONS), help=f"One direction; without it {direction}."),
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def choice_of(workload: str | None, shape: str | None, dtype: str | None, config: str | None, direction: str | None) -> Choice:
    """Returns the options as a `Choice`.

    Raises:
        click.UsageError: Two of them exclude each other.
    """
    if workload is not None and shape is not None:
        raise click.UsageError("--workload and --shape exclude each other.")
    return Choice(workload=workload, shape=shape, dtype=dtype, config=config, direction=direction)


def points(kernels: "Sequence[Kernel]", targets: Sequence[Target], choice: Choice) -> list[Point]:
    """Returns the chosen points in order; one that cannot be bound carries its error.

    Raises:
        ConfigError: A workload, dtype, direction or config key that none of the kernels has.
        TpukernError: None can be bound, all for the same reason.
    """
    from tpukern.dsl import Config

    workloads = chosen_workloads(kernels, choice)
    found = [
        Point(kernel=kernel, direction=direction, workload=workload, target=target)
        for kernel in kernels
        for direction in chosen_directions(kernel, choice)
        for workload in workloads[kernel.name]
        if direction in workload.directions
        for target in targets
    ]
    subject = kernels[0].name if len(kernels) == 1 else "all"
    if not found:
        raise nothing(kernels, subject, choice)
    given = Config({}) if choice.config is None else Config.parse(choice.config)
    spaces: list[tuple[str, ...]] = []
    bound = [bind(point, given, spaces) for point in found]
    if spaces:
        known_keys(given, spaces, subject)
    first = bound[0].error
    if first is not None and {str(point.error) for point in bound} == {str(first)}:
        raise first
    return bound


def chosen_workloads(kernels: "Sequence[Kernel]", choice: Choice) -> "dict[str, list[Workload]]":
    from tpukern.dsl import Workload

    if choice.shape is None:
        found = find_workloads(kernels, choice.workload)
    else:
        found = {}
        for kernel in kernels:
            sizes = parse_shape(kernel.name, choice.shape)
            found[kernel.name] = [Workload(choice.shape, dtype=kernel.dtypes[0], source="--shape", **sizes)]
    if choice.dtype is None:
        return found
    dtypes = {kernel.name: find_dtype(kernel, choice.dtype) for kernel in kernels}
    return {name: [with_dtype(w, dtypes[name]) for w in group] for name, group in found.items()}


def with_dtype(w: "Workload", dtype: str) -> "Workload":
    return type(w)(w.name, dtype=dtype, directions=w.directions, source=w.source, tables=dict(w.tables), **w.values)


def chosen_directions(kernel: "Kernel", choice: Choice) -> Iterator[str]:
    return (direction for direction in kernel.directions if choice.direction in (None, direction))


def nothing(kernels: "Sequence[Kernel]", subject: str, choice: Choice) -> ConfigError:
    """Returns why no point is left."""
    known = list(dict.fromkeys(direction for kernel in kernels for direction in kernel.directions))
    if choice.direction is not None and choice.direction not in known:
        return ConfigError(subject, f"no direction {choice.direction!r}", f"one of {known}")
    asked = f"workload {choice.workload!r}" if choice.workload is not None else "workload"
    return ConfigError(subject, f"no {asked} with direction {choice.direction or known[0]!r}", "a workload that claims it")


def bind(point: Point, given: Mapping[str, Any], spaces: list[tuple[str, ...]]) -> Point:
    """Returns the point bound to its config: the default one with those of the given keys that it has."""
    kernel = point.kernel.directions[point.direction]
    try:
        signature = kernel.workload_signature(point.workload)
        keys = (*kernel.default_config(signature, point.target), *(("order",) if kernel.is_tile else ()))
        spaces.append(keys)
        own = {key: value for key, value in given.items() if key in keys}
        bound = kernel.bind_signature(signature, config=own, target=point.target)
    except TpukernError as e:
        return dataclasses.replace(point, error=e)
    return dataclasses.replace(point, bound=bound)
