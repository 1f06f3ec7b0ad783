"""The pytest plugin: kernels' verdicts as tests.

    pytest --tpukern                       # every kernel of the project, beside its tests
    test_mine = verdict_tests(my_kernel)   # or one line in a test file

It loads in every pytest run of an environment that has tpukern, so it imports nothing but pytest until it is asked.
"""

import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tpukern.dsl import Kernel

MARKERS = (
    "tpukern(kernel): a property of a kernel's verdict",
    "tpukern_property(name): which property it is",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds our options."""
    group = parser.getgroup("tpukern", "TPU kernels")
    group.addoption("--tpukern", action="store_true", help="verify every @tpukern.kernel of the project too")
    group.addoption(
        "--tpukern-kernel", action="append", metavar="NAME", default=[], help="only this kernel's verdict; can be repeated"
    )
    group.addoption("--tpukern-examples", type=int, metavar="N", help="draw this many inputs a kernel")
    group.addoption("--tpukern-seed", type=int, metavar="S", default=0, help="draw them from this seed")
    group.addoption("--tpukern-target", metavar="NAMES", default="", help="compile for these chips too: v5e,v6e,... or all")
    parser.addini("tpukern_modules", "modules (or files) whose kernels --tpukern verifies", type="args", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Registers our markers, and refuses targets that there are not."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("--tpukern-target"):
        from tpukern.errors import ConfigError

        try:
            targets_named(config)
        except ConfigError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Gives the processes of pytest-xdist a folder for verdicts, so that each is reached once."""
    if not hasattr(node.config, "tpukern_folder"):
        folder = tempfile.TemporaryDirectory(prefix="tpukern-verdicts-")
        node.config.tpukern_folder = folder.name
        node.config.add_cleanup(folder.cleanup)
    node.workerinput["tpukern_folder"] = node.config.tpukern_folder


def targets_named(config: pytest.Config) -> tuple[str, ...]:
    """Returns the names of the chips that the command line asks for.

    Raises:
        ConfigError: There is no such chip.
    """
    from tpukern.targets import TARGETS, target

    names = [name.strip() for name in config.getoption("--tpukern-target").split(",") if name.strip()]
    return tuple(TARGETS) if names == ["all"] else tuple(target(name).name for name in names)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives what `verdict_tests` returned one case for each question."""
    asked = getattr(metafunc.function, "tpukern_questions", None)
    if asked is not None:
        cases = [
            pytest.param(direction, name, id=f"{kernel}-{direction}-{name}", marks=pytest.mark.tpukern_property(name))
            for kernel, direction, name in asked(bool(targets_named(metafunc.config)))
        ]
        metafunc.parametrize(("direction", "property_name"), cases)


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose among the items, and xdist groups them
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the items of `--tpukern`, and leaves out what `--tpukern-kernel` does not name."""
    wanted = config.getoption("--tpukern-kernel")
    if config.getoption("--tpukern"):
        items.extend(_collected(session, config, {name for item in items if (name := kernel_of(item)) is not None}))
    if wanted:
        _select(config, items, wanted)


def kernel_of(item: pytest.Item) -> str | None:
    """Returns the name of the kernel that an item judges, None if it is another kind of test."""
    mark = item.get_closest_marker("tpukern")
    return None if mark is None else str(mark.args[0])


def _collected(session: pytest.Session, config: pytest.Config, covered: set[str]) -> list[pytest.Item]:
    from tpukern.errors import TpukernError

    try:
        from tpukern.testing import items

        kernels = items.kernels_of(config.getini("tpukern_modules"), config.rootpath)
        settings = items.Settings.read(config)
    except TpukernError as error:
        raise pytest.UsageError(str(error)) from error
    parent = Kernels.from_parent(session, name="tpukern", nodeid="tpukern")
    for kernel in kernels:
        if kernel.name not in covered:
            for direction, name in items.questions(kernel, None, bool(settings.targets)):
                parent.items.append(Question.of(parent, kernel, direction, name, settings))
    report = config.hook.pytest_make_collect_report(collector=parent)
    config.hook.pytest_collectreport(report=report)  # they are counted among the collected
    return parent.items


def _select(config: pytest.Config, items: list[pytest.Item], wanted: Sequence[str]) -> None:
    from tpukern.errors import ConfigError, did_you_mean

    names = sorted({name for item in items if (name := kernel_of(item)) is not None})
    for name in wanted:
        if name not in names:
            found = ConfigError("--tpukern-kernel", f"no kernel {name!r}", f"one of {names}", did_you_mean(name, names))
            raise pytest.UsageError(str(found))
    left = [item for item in items if kernel_of(item) not in wanted]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if kernel_of(item) in wanted]


class Kernels(pytest.Collector):
    """The place of `--tpukern`'s items in the tree: they belong to no file."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.items: list[pytest.Item] = []

    def collect(self) -> list[pytest.Item]:
        return self.items


class Question(pytest.Item):
    """One property of one kernel in one direction."""

    kernel: "Kernel"
    direction: str
    property: str
    settings: Any

    @classmethod
    def of(cls, parent: Kernels, kernel: "Kernel", direction: str, name: str, settings: Any) -> "Question":
        """Returns the item; its name is the same in every process."""
        item: Question = cls.from_parent(parent, name=f"{kernel.name}-{direction}-{name}")
        item.kernel, item.direction, item.property, item.settings = kernel, direction, name, settings
        for mark in (
            pytest.mark.tpukern(kernel.name),
            pytest.mark.tpukern_property(name),
            pytest.mark.xdist_group(f"tpukern-{kernel.name}"),
        ):
            item.add_marker(mark)
        return item

    def runtest(self) -> None:
        from tpukern.testing import items

        items.ask(self.kernel, self.direction, self.property, self.settings)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.kernel.fn.__code__.co_filename, self.kernel.fn.__code__.co_firstlineno - 1, self.name
