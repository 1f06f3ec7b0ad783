"""What is kept is whole or absent, whatever happens to the writers, and its name has everything in it."""

import dataclasses
import enum
import errno
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukern import cache as caching
from tpukern import compiling, environment
from tpukern.cache import Cache
from tpukern.targets import TARGETS
from tpukern.value_names import Unkeyable, canonical, stable

KEY = {"kernel": "demo", "target": "v5e"}
VALUE = {"ok": True, "seconds": 0.25, "error": None}


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache", 1 << 20)


def files(cache: Cache) -> list[pathlib.Path]:
    return [path for path in cache.folder.rglob("*") if path.is_file()]


def test_values_come_back(cache):
    assert cache.get(KEY) is None
    cache.put(KEY, VALUE)
    assert cache.get(KEY) == VALUE
    assert cache.get(KEY | {"target": "v6e"}) is None
    assert Cache(cache.folder, 1 << 20).get(dict(reversed(KEY.items()))) == VALUE
    assert cache.size() == (1, cache.path(KEY).stat().st_size)
    cache.put(KEY, VALUE | {"seconds": 1.0})
    assert cache.get(KEY)["seconds"] == 1.0
    assert len(files(cache)) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data.replace(b"0.25", b"0.75"),
        lambda data: data.replace(b'"sha256"', b'"sha255"'),
        lambda data: data.replace(b"true", b"\xff\xfe"),
        lambda data: b"null",
        lambda data: b"[" * 100_000,
        lambda data: os.urandom(len(data)),
    ],
)
def test_a_corrupt_entry_is_a_miss_and_is_removed(cache, damage):
    cache.put(KEY, VALUE)
    path = cache.path(KEY)
    data = path.read_bytes()
    assert damage(data) != data
    path.write_bytes(damage(data))
    assert cache.get(KEY) is None
    assert not path.exists()
    cache.put(KEY, VALUE)
    assert cache.get(KEY) == VALUE


def test_an_entry_under_another_entrys_name_is_a_miss(cache):
    other = KEY | {"kernel": "other"}
    cache.put(KEY, VALUE)
    cache.path(other).parent.mkdir(parents=True, exist_ok=True)
    cache.path(KEY).rename(cache.path(other))
    assert cache.get(other) is None


def test_the_oldest_entries_go_first(cache):
    def key(n):
        return {"n": n}

    for n in range(10):
        cache.put(key(n), "x" * 1000)
        os.utime(cache.path(key(n)), (n, n))
    assert cache.get(key(0)) is not None  # read just now
    each = cache.size()[1] // 10
    cache.limit_bytes = 4 * each + 10
    cache.prune()
    assert [n for n in range(10) if cache.get(key(n))] == [0, 7, 8, 9]
    assert cache.size()[1] <= cache.limit_bytes


def test_the_size_stays_bounded_while_writing(tmp_path):
    cache = Cache(tmp_path, 50_000)
    for n in range(300):
        cache.put({"n": n}, "x" * 1000)
    entries, size = cache.size()
    assert entries >= 30
    assert size <= 50_000 + 64 * 1300


def test_what_killed_writers_left_is_swept(cache):
    cache.put(KEY, VALUE)
    folder = cache.path(KEY).parent
    old, new = folder / ".old.tmp", folder / ".new.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.prune()
    assert (old.exists(), new.exists(), cache.get(KEY)) == (False, True, VALUE)
    assert cache.size()[0] == 1


def check_it_does_no_harm(cache: Cache, reason: str) -> None:
    def put_twice():
        cache.put(KEY, VALUE)
        cache.put(KEY, VALUE)

    with pytest.warns(RuntimeWarning) as caught:
        put_twice()
    assert [str(w.message) for w in caught] == [
        f"tpukern[cache]: {cache.folder} cannot be written: {reason}; results are not kept. Mend it, or set TPUKERN_CACHE_DIR."
    ]
    assert cache.problem == f"{cache.folder} cannot be written: {reason}"
    assert cache.get(KEY) is None


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache", 1 << 20)
    check_it_does_no_harm(cache, "Not a directory")
    assert cache.check() == f"{cache.folder} cannot be written: Not a directory"
    assert cache.size() == (0, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_can_still_be_read(cache):
    cache.put({"kernel": "kept"}, VALUE)
    folders = [path for path in (cache.folder, *cache.folder.rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        check_it_does_no_harm(cache, "Permission denied")
        assert cache.get({"kernel": "kept"}) == VALUE
    finally:
        for folder in folders:
            folder.chmod(0o755)


class FullDisk:
    """A file that takes ten bytes."""

    def __init__(self, descriptor: int, mode: str) -> None:
        self.file = open(descriptor, mode)  # noqa: SIM115 (closed by __exit__)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()

    def write(self, data):
        self.file.write(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_nothing_half_written(cache, monkeypatch):
    cache.put({"kernel": "kept"}, VALUE)
    with monkeypatch.context() as patched:
        patched.setattr(caching.os, "fdopen", FullDisk)
        check_it_does_no_harm(cache, "No space left on device")
    assert cache.check() is None
    assert len(files(cache)) == 1
    assert cache.get({"kernel": "kept"}) == VALUE


WRITER = """
import pathlib, sys
from tpukern.cache import Cache
cache = Cache(pathlib.Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
while True:
    for n in range(40):
        cache.put({"n": n}, {"text": str(n) * 20_000})
"""


def test_entries_survive_kill_9_and_writers_of_the_same_entry(tmp_path):
    for round_ in range(4):
        program = [sys.executable, "-c", WRITER, str(tmp_path)]
        writers = [subprocess.Popen(program, stdout=subprocess.PIPE, cwd="/") for _ in range(2)]
        for writer in writers:
            writer.stdout.readline()
        time.sleep(0.05 + 0.07 * round_)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        cache = Cache(tmp_path, 1 << 30)
        kept = list(tmp_path.glob("compiled/*/*.json"))
        assert kept
        for path in kept:
            n = json.loads(path.read_bytes())["body"]["key"]["n"]
            assert cache.get({"n": n}) == {"text": str(n) * 20_000}


# --- names of values -------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: float


def shift(n):
    return lambda x: x + n


def helper(x):
    return x * 2


def uses_helper(x):
    return helper(x)


DIFFERENT = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ("1", 1),
    (None, "None"),
    ((1, 2), [1, 2]),
    ((1, (2,)), ((1, 2),)),
    ({"a": 1}, {"a": 2}),
    (frozenset("ab"), frozenset("ac")),
    (Colour.RED, Colour.BLUE),
    (Point(1, 2.0), Point(1, 3.0)),
    (np.float32, np.float64),
    (np.dtype("float32"), np.dtype("int32")),
    (jnp.dtype("bfloat16"), jnp.dtype("float8_e4m3fn")),
    (np.int32(3), np.int64(3)),
    (np.arange(3), np.arange(1, 4)),
    (len, max),
    ([1].index, [2].index),
    (jax.nn.relu, jax.nn.gelu),
    (jnp.tanh, jnp.exp),
    (jnp.add, jnp.multiply),
    (shift(1), shift(2)),
    (Point(1, 2.0).__eq__, Point(2, 2.0).__eq__),
    (lambda x: x in {"a", "b"}, lambda x: x in {"a", "c"}),
    (lambda x: x + 1, lambda x: x + 2),
    (lambda x, y=1: x, lambda x, y=2: x),
    (functools.partial(helper, 1), functools.partial(helper, 2)),
    (helper, uses_helper),
]


@pytest.mark.parametrize(("one", "two"), DIFFERENT, ids=range(len(DIFFERENT)))  # their texts hold addresses
def test_different_values_have_different_names(one, two):
    names = [canonical(stable(value)) for value in (one, two)]
    assert names[0] != names[1]
    assert names == [canonical(stable(value)) for value in (one, two)]


def test_a_functions_name_follows_the_helpers_it_calls(monkeypatch):
    before = stable(uses_helper)
    assert stable(shift(3)) == stable(shift(3))
    monkeypatch.setitem(globals(), "helper", lambda x: x * 3)
    assert stable(uses_helper) != before


def test_functions_that_call_themselves_have_a_name():
    def down(n):
        return down(n - 1) if n else 0

    assert stable(down) == stable(down)


@pytest.mark.parametrize("value", [object(), iter(()), memoryview(b"x"), object().__eq__])
def test_values_that_mean_nothing_outside_the_process_have_none(value):
    with pytest.raises(Unkeyable):
        stable(value)


def test_names_are_the_same_in_every_process():
    code = (
        "import jax.numpy as jnp, jax\nfrom tpukern.value_names import digest, stable\n"
        "print(digest(stable([{'b', 'a', 'c'}, jax.nn.relu, jnp.add, lambda x: x in {'p', 'q', 'r', 's'}, {'k': (1, 2.5)}])))"
    )
    said = set()
    for seed in "012":
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, check=True)
        said.add(done.stdout)
    assert len(said) == 1


# --- keys of compiles ------------------------------------------------------------------------------------------------

KERNEL = """
from tpukern.dsl import Block, Choice, Dim, In, Out, Ref, kernel
import {helper}

@kernel(op="tests::keyed", dtypes=("float32", "bfloat16"))
def keyed(
    x: Ref = In("r d"), y: Ref = Out("r d"), *,
    factor: float = 2.0, act=None, r: Dim = Block(8, 16), way: str = Choice("a", "b"),
) -> None:
    y[...] = {helper}.scaled(x[...], factor)
"""
HELPER = "def scaled(x, factor):\n    return x * factor\n"


class Keyed:
    """A kernel in a module of its own that uses a helper module, and a way to change either."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def load(self, kernel: str = KERNEL, helper: str = HELPER):
        for name, text in (("keyed_helper", helper), ("keyed_kernel", kernel.format(helper="keyed_helper"))):
            path = self.folder / f"{name}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            self.monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        return sys.modules["keyed_kernel"].keyed


def key(kernel, shape=(32, 128), dtype="float32", target="v5e", options=(), **keywords):
    bound = kernel.bind(jax.ShapeDtypeStruct(shape, dtype), **keywords)
    return compiling.key(bound, TARGETS[target], kernel.source_digest(), compiling.surroundings(dict(options)))


@pytest.fixture
def keyed(tmp_path, monkeypatch):
    return Keyed(tmp_path, monkeypatch)


def test_equal_compiles_have_equal_keys(keyed):
    one = key(keyed.load())
    assert one == key(keyed.load())
    assert json.loads(json.dumps(one)) == one
    assert set(one) == {
        "config", "inputs", "jax_settings", "kernel", "options", "road", "source", "statics", "target", "versions",
    }  # fmt: skip
    assert set(one["versions"]) == {"jax", "jaxlib", "libtpu", "python"}


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": (64, 128)},
        {"dtype": "bfloat16"},
        {"target": "v6e"},
        {"options": {"xla_tpu_scoped_vmem_limit_kib": 65536}},
        {"block_r": 16},
        {"way": "b"},
        {"factor": 3.0},
        {"act": jax.nn.relu},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_the_key_reacts_to_what_is_asked_for(keyed, changed):
    kernel = keyed.load()
    assert key(kernel, **changed) != key(kernel)


def test_the_key_reacts_to_the_kernels_source(keyed):
    assert key(keyed.load(KERNEL.replace("factor)", "factor + 1.0)"))) != key(keyed.load())


def test_the_key_reacts_to_a_helpers_source(keyed):
    assert key(keyed.load(helper=HELPER.replace("x * factor", "x + factor"))) != key(keyed.load())


@pytest.mark.parametrize("package", ["jax", "jaxlib", "libtpu"])
def test_the_key_reacts_to_versions(keyed, monkeypatch, package):
    kernel = keyed.load()
    before = key(kernel)
    real = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.9" if name == package else real(name))
    assert key(kernel)["versions"] == before["versions"] | {package: "9.9.9"}


def test_the_key_reacts_to_the_interpreter_and_to_our_own_sources(keyed, monkeypatch):
    kernel = keyed.load()
    before = key(kernel)
    with monkeypatch.context() as patched:
        patched.setattr(caching, "interpreter", lambda: "CPython 9")
        assert key(kernel) != before
    monkeypatch.setattr(caching, "road_digest", lambda: "other")
    assert key(kernel) != before


def test_the_key_reacts_to_jax_settings(keyed):
    kernel = keyed.load()
    before = key(kernel)
    with jax.default_matmul_precision("highest"):
        assert key(kernel) != before


def touch(path, seconds_from_now):
    moment = time.time() + seconds_from_now
    os.utime(path, (moment, moment))


def test_source_changed_after_it_was_loaded_is_outdated(keyed):
    kernel = keyed.load()
    helper = keyed.folder / "keyed_helper.py"
    assert not caching.is_outdated(kernel)
    time.sleep(0.05)
    touch(helper, 0)
    assert caching.is_outdated(kernel)
    again = keyed.load()
    assert not caching.is_outdated(again)
    touch(helper, 86_400)  # the clock of the machine that wrote it is ahead
    assert not caching.is_outdated(again)


def test_our_own_source_changed_after_it_was_loaded_is_outdated(keyed, monkeypatch):
    kernel = keyed.load()
    monkeypatch.setattr(environment, "LOADED_AT", time.time() - 10 * 365 * 86_400)
    assert caching.is_outdated(kernel)


def test_results_of_outdated_source_are_neither_looked_up_nor_kept(keyed, monkeypatch, tmp_path):
    """The file says one thing and the process runs another: its result must not be filed under what the file says."""
    monkeypatch.setenv("TPUKERN_CACHE_DIR", str(tmp_path / "cache"))
    job = compiling.Job(bound=keyed.load().bind(jax.ShapeDtypeStruct((32, 128), "float32")), target=TARGETS["v5e"])
    assert compiling._Run([job], {}, None).keys[0] is not None
    time.sleep(0.05)
    (keyed.folder / "keyed_helper.py").write_text(HELPER.replace("*", "+"))
    assert compiling._Run([job], {}, None).keys == [None]
    assert compiling._Run([job], {}, None).look_up() == [0]


def test_our_own_sources_are_the_whole_road():
    here = pathlib.Path(caching.__file__).parent
    digested = []
    real = pathlib.Path.read_bytes

    def read(path):
        digested.append(path.name)
        return real(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pathlib.Path, "read_bytes", read)
        caching.road_digest.__wrapped__()
    assert {"lowering.py", "worker.py", "jax_adapter.py", *(p.name for p in (here / "dsl").glob("*.py"))} <= set(digested)
