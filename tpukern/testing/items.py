"""Verdicts as pytest items: which there are, and what each says. `plugin` has the hooks."""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tpukern.dsl import Kernel
from tpukern.errors import ConfigError, did_you_mean
from tpukern.targets import target as target_named
from tpukern.testing.findings import PROPERTIES, Verdict
from tpukern.testing.plugin import targets_named

_STORE = Path(".tpukern") / "regressions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run of pytest asks of every verdict.

    Attributes:
        examples: Inputs drawn; None for the default of `parity`.
        seed: What they are drawn from.
        targets: Names of chips to compile for.
        store: Folder of inputs that failed before.
        properties: Some of `PROPERTIES`; None for all.
        shared: Folder that the processes of this run share; None if there is one process.
    """

    examples: int | None = None
    seed: int = 0
    targets: tuple[str, ...] = ()
    store: Path | None = None
    properties: tuple[str, ...] | None = None
    shared: Path | None = None

    @classmethod
    def read(cls, config: pytest.Config) -> "Settings":
        """Reads the command line.

        Raises:
            ConfigError: There is no such chip, or Hypothesis is not installed.
        """
        if importlib.util.find_spec("hypothesis") is None:
            do = "pip install 'tpukern[verify]'"
            raise ConfigError("verify", "hypothesis is not installed", "it, since the inputs are drawn by it", do)
        folder = getattr(config, "workerinput", {}).get("tpukern_folder")
        return cls(
            examples=config.getoption("--tpukern-examples"),
            seed=config.getoption("--tpukern-seed"),
            targets=targets_named(config),
            store=config.rootpath / _STORE,
            shared=None if folder is None else Path(folder),
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
    some = None if properties is None else tuple(properties)

    @pytest.mark.tpukern(kernel.name)
    @pytest.mark.xdist_group(f"tpukern-{kernel.name}")
    def verdict(request: pytest.FixtureRequest, direction: str, property_name: str) -> None:
        given = Settings.read(request.config)
        chosen = dataclasses.replace(
            given,
            examples=examples if given.examples is None else given.examples,
            targets=given.targets or chips,
            properties=some,
        )
        ask(kernel, direction, property_name, chosen)

    def asked(compiles: bool) -> list[tuple[str, str, str]]:
        return [(kernel.name, *question) for question in questions(kernel, some, compiles or bool(chips))]

    verdict.tpukern_questions = asked  # type: ignore[attr-defined]  # for `plugin`, which knows the command line
    return verdict


def questions(kernel: Kernel, properties: Sequence[str] | None, compiles: bool) -> Iterator[tuple[str, str]]:
    """Yields the directions and properties that a verdict on a kernel has."""
    for name, directions in PROPERTIES.items():
        if (properties is None or name in properties) and (compiles or name != "compiles"):
            yield from ((direction, name) for direction in directions if direction in kernel.directions)


def ask(kernel: Kernel, direction: str, name: str, settings: Settings) -> None:
    """Fails the running test with what the verdict found; skips it if the question was not asked.

    What belongs to no test (a kernel that turns out to be flaky when only `parity` is asked) fails the first one.
    """
    answers = _answers(kernel, settings)
    asked = list(questions(kernel, settings.properties, bool(settings.targets)))
    found = list(answers[direction, name].findings)
    if (direction, name) == asked[0]:
        found += [text for question, answer in answers.items() if question not in asked for text in answer.findings]
    if found:
        pytest.fail("\n\n".join(found), pytrace=False)
    if answers[direction, name].skipped:
        pytest.skip(answers[direction, name].skipped)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a test shows of a verdict.

    Attributes:
        findings: Each as text, with its script.
        skipped: Why the question was not asked; empty if it was.
    """

    findings: tuple[str, ...] = ()
    skipped: str = ""


Answers = dict[tuple[str, str], Answer]  # by direction and property


@functools.lru_cache(maxsize=64)
def _answers(kernel: Kernel, settings: Settings) -> Answers:
    """Returns the verdict, reached once a process; once a run, where processes share a folder."""
    if settings.shared is None:
        return _told(_verdict(kernel, settings))
    import fcntl

    key = hashlib.sha256(repr((kernel.fn.__module__, kernel.name, settings)).encode()).hexdigest()[:16]
    path = settings.shared / f"{key}.json"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a process that dies gives it up
        if not path.exists():
            answers = _told(_verdict(kernel, settings))
            path.write_text(json.dumps([[*question, answer.findings, answer.skipped] for question, answer in answers.items()]))
    stored = json.loads(path.read_text())
    return {(d, name): Answer(findings=tuple(found), skipped=skipped) for d, name, found, skipped in stored}


def _told(verdict: Verdict) -> Answers:
    return {
        (r.direction, r.property): Answer(
            findings=tuple(f"{f}\n\nReproduce it:\n\n{f.script}" if f.script else str(f) for f in r.findings),
            skipped=r.skipped,
        )
        for r in verdict.results
    }  # fmt: skip


def _verdict(kernel: Kernel, settings: Settings) -> Verdict:
    from tpukern.testing.verdict import EXAMPLES, parity

    examples = EXAMPLES if settings.examples is None else settings.examples
    return parity(
        kernel, examples=examples, seed=settings.seed, targets=settings.targets, properties=settings.properties,
        store=settings.store,
    )  # fmt: skip


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
