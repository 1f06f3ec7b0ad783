"""Verdicts as pytest items: which there are, and what each says. `plugin` has the hooks."""

import dataclasses
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tpukern.dsl import Kernel
from tpukern.errors import ConfigError, did_you_mean
from tpukern.targets import TARGETS
from tpukern.targets import target as target_named
from tpukern.testing.findings import PROPERTIES, Finding, Verdict

_STORE = Path(".tpukern") / "regressions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run of pytest asks of every verdict.

    Attributes:
        examples: Inputs drawn; None for the default of `parity`.
        seed: What they are drawn from.
        targets: Names of chips to compile for.
        store: Folder of inputs that failed before.
    """

    examples: int | None = None
    seed: int = 0
    targets: tuple[str, ...] = ()
    store: Path | None = None

    @classmethod
    def read(cls, config: pytest.Config) -> "Settings":
        """Reads the command line.

        Raises:
            ConfigError: There is no such chip, or Hypothesis is not installed.
        """
        if importlib.util.find_spec("hypothesis") is None:
            do = "pip install 'tpukern[verify]'"
            raise ConfigError("verify", "hypothesis is not installed", "it, since the inputs are drawn by it", do)
        names = [name.strip() for name in config.getoption("--tpukern-target").split(",") if name.strip()]
        targets = tuple(TARGETS) if names == ["all"] else tuple(target_named(name).name for name in names)
        return cls(
            examples=config.getoption("--tpukern-examples"),
            seed=config.getoption("--tpukern-seed"),
            targets=targets,
            store=config.rootpath / _STORE,
        )


def verdict_tests(
    kernel: Kernel, *, examples: int | None = None, properties: Sequence[str] | None = None, targets: Sequence[str] = ()
) -> Callable[..., None]:
    """Returns a kernel's verdict as a pytest test, one case for each property and direction.

    In a test file: `test_softmax = verdict_tests(softmax)`. The command line's `--tpukern-examples`, `-seed` and `-target` win.

    Args:
        kernel: The kernel.
        examples: Inputs drawn; None for the default of `parity`.
        properties: Some of `PROPERTIES`; None for all.
        targets: Names of chips to compile for.

    Raises:
        ConfigError: There is no such property or chip.
    """
    for name in properties or ():
        if name not in PROPERTIES:
            raise ConfigError(
                kernel.name, f"no property {name!r}", f"one of {list(PROPERTIES)}", did_you_mean(name, PROPERTIES)
            )
    chips = tuple(target_named(name).name for name in targets)
    asked = list(questions(kernel, properties, bool(chips)))
    cases = [
        pytest.param(direction, name, id=f"{kernel.name}-{direction}-{name}", marks=pytest.mark.tpukern_property(name))
        for direction, name in asked
    ]

    @pytest.mark.tpukern(kernel.name)
    @pytest.mark.xdist_group(f"tpukern-{kernel.name}")
    @pytest.mark.parametrize(("direction", "property_name"), cases)
    def verdict(request: pytest.FixtureRequest, direction: str, property_name: str) -> None:
        given = Settings.read(request.config)
        settings = dataclasses.replace(
            given, examples=examples if given.examples is None else given.examples, targets=given.targets or chips
        )
        ask(kernel, direction, property_name, settings)

    return verdict


def questions(kernel: Kernel, properties: Sequence[str] | None, compiles: bool) -> Iterator[tuple[str, str]]:
    """Yields the directions and properties that a verdict on a kernel has."""
    for name, directions in PROPERTIES.items():
        if (properties is None or name in properties) and (compiles or name != "compiles"):
            yield from ((direction, name) for direction in directions if direction in kernel.directions)


def ask(kernel: Kernel, direction: str, name: str, settings: Settings) -> None:
    """Fails the running test with what the verdict found; skips it if the question was not asked."""
    found = _verdict(kernel, settings)
    result = next(r for r in found.results if (r.property, r.direction) == (name, direction))
    if result.findings:
        pytest.fail("\n\n".join(map(_told, result.findings)), pytrace=False)
    if result.skipped:
        pytest.skip(result.skipped)


def _told(finding: Finding) -> str:
    return f"{finding}\n\nReproduce it:\n\n{finding.script}" if finding.script else str(finding)


@functools.lru_cache(maxsize=64)
def _verdict(kernel: Kernel, settings: Settings) -> Verdict:
    """Returns the verdict, reached once a process."""
    from tpukern.testing.verdict import EXAMPLES, parity

    examples = EXAMPLES if settings.examples is None else settings.examples
    return parity(kernel, examples=examples, seed=settings.seed, targets=settings.targets, store=settings.store)


# --- which kernels a project has -------------------------------------------------------------------------------------


def kernels_of(modules: Iterable[str], root: Path) -> list[Kernel]:
    """Returns a project's kernels that have a reference, by name.

    Args:
        modules: Names of modules, or paths of files below `root`; if there are none, every module loaded from below `root`.
        root: The project's folder.

    Raises:
        ConfigError: A module does not import.
    """
    named = [_imported(name, root) for name in modules]
    found = {id(k): k for module in named or _loaded_below(root) for k in vars(module).values() if isinstance(k, Kernel)}
    own = [k for k in found.values() if k.forward is None and k.reference is not None]
    return sorted(own, key=lambda k: (k.name, k.fn.__module__))


def _loaded_below(root: Path) -> list[types.ModuleType]:
    found = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and (path := Path(file).resolve()).is_relative_to(root.resolve()) and "site-packages" not in path.parts:
            found.append(module)
    return found


def _imported(name: str, root: Path) -> types.ModuleType:
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = root / name
        if not path.is_file():
            raise FileNotFoundError(f"no file {name}")
        known = next((m for m in sys.modules.values() if getattr(m, "__file__", None) == str(path)), None)
        if known is not None:
            return known
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        return importlib.import_module(path.stem)
    except Exception as error:
        found = f"{name} does not import: {type(error).__name__}: {error}"
        raise ConfigError("tpukern_modules", found.rstrip("."), "modules that import, or files of the project") from error
