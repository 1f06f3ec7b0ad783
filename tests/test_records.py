"""Records of tuned configs: what is chosen for a call, and that nothing recorded is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import tpukern
from tpukern import device, running, tagging
from tpukern.autotune import recalling, recording
from tpukern.autotune.recording import Record, Store
from tpukern.cli.app import cli
from tpukern.dsl import Config, declared
from tpukern.errors import ConfigError, RecordError

ROWS = tpukern.Block(8, 16, 32, 64, 128, 256, 512, 1024, default=64)


@tpukern.kernel(op="test_records::scaled")
def scaled(
    x: tpukern.Ref = tpukern.In("r d"),
    y: tpukern.Ref = tpukern.Out("r d"),
    *,
    factor: float = 2.0,
    mode: str = "a",
    r: tpukern.Dim = ROWS,
) -> None:
    y[...] = x[...] * factor


def scaled_backward(dy: jax.Array, factor: float = 2.0, mode: str = "a") -> dict[str, jax.Array]:
    return {"dx": scaled(dy, factor=factor, mode=mode)}


scaled.backward(scaled_backward)


def signature(r: int = 4096, d: int = 1024, dtype: str = "float32", **statics: object) -> tpukern.dsl.Signature:
    return scaled.signature(jax.ShapeDtypeStruct((r, d), jnp.dtype(dtype)), **statics)


def record(r: int = 4096, d: int = 1024, block: int = 16, **fields: object) -> Record:
    known: dict = {
        "kernel": "scaled",
        "target": "v5e",
        "inputs": ("float32",),
        "statics": {"mode": "a"},
        "sizes": {"r": r, "d": d},
        "config": {"block_r": block},
        "us": 10.0,
        "source": "replay",
        "date": "2026-01-01T00:00:00Z",
        "versions": {"libtpu": "0.0.51"},
    }
    return Record(**{**known, **fields})


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Empty folders of the user's and of shipped records."""
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    monkeypatch.setenv("TPUKERN_RECORDS_DIR", str(user))
    monkeypatch.delenv("TPUKERN_RECORDS", raising=False)
    monkeypatch.setattr(recalling, "SHIPPED", shipped)
    monkeypatch.setattr(recording, "SHIPPED", shipped)
    recalling.forget([scaled])
    return user, shipped


def add(folder: Path, *records: Record) -> None:
    Store(folder).add(records)
    recalling.forget(declared.kernels())


def chosen(of: tpukern.dsl.Signature | None = None, target: str | None = "v5e") -> tuple[str, str]:
    asked = of or signature()
    return str(scaled.default_config(asked, target)), scaled.config_origin(asked, target)


# --- which is chosen ---------------------------------------------------------------------------------------------------


def test_layers(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    user, shipped = folders
    assert chosen() == ("block_r=64", "default")
    add(shipped, record(block=32))
    assert chosen() == ("block_r=32", "shipped record")
    add(user, record(block=128))
    assert chosen() == ("block_r=128", "user record")
    assert scaled.bind_signature(signature(), target="v5e").config == {"block_r": 128}
    assert scaled.bind_signature(signature(), {"block_r": 8}, "v5e").config == {"block_r": 8}
    assert str(scaled.declared_config(signature(), "v5e")) == "block_r=64"
    for used, wanted in (("shipped", 32), ("user", 128), ("off", 64), ("all", 128)):
        monkeypatch.setenv("TPUKERN_RECORDS", used)
        recalling.forget([scaled])
        assert chosen()[0] == f"block_r={wanted}"


def test_only_a_chip_has_records(folders: tuple[Path, Path]) -> None:
    add(folders[0], record(block=128))
    assert chosen(target=None) == ("block_r=64", "default")
    assert chosen(target="v6e") == ("block_r=64", "default")
    assert scaled.largest_config(signature()) == {"block_r": 1024}


def test_the_same_sizes_in_the_shipped_layer_come_before_near_ones_of_the_user(folders: tuple[Path, Path]) -> None:
    user, shipped = folders
    add(user, record(r=8192, block=128))
    add(shipped, record(block=32))
    assert chosen() == ("block_r=32", "shipped record")
    assert chosen(signature(r=8192)) == ("block_r=128", "user record")


def test_the_nearest_sizes(folders: tuple[Path, Path]) -> None:
    add(folders[0], record(r=1024, block=128), record(r=16384, d=2048, block=256), record(r=4096, d=256, block=512))
    assert chosen(signature(r=2048)) == ("block_r=128", "user record of r=1024,d=1024")  # 1 away, the others 4 and 3
    assert chosen(signature(r=16384)) == ("block_r=256", "user record of r=16384,d=2048")
    assert chosen(signature(r=1024 * 16, d=1024 * 16)) == ("block_r=32", "default")  # 256 rows of that do not fit


def test_a_near_config_that_does_not_fit_is_passed_over(folders: tuple[Path, Path]) -> None:
    add(folders[0], record(r=4096, d=2048, block=1024), record(r=4096, d=8192, block=32))
    assert chosen(signature(r=4096, d=4096)) == ("block_r=32", "user record of r=4096,d=8192")
    add(folders[0], record(r=4096, d=4096, block=512))  # of the very sizes: the compiler has accepted it
    assert chosen(signature(r=4096, d=4096)) == ("block_r=512", "user record")


def test_what_is_too_far_or_of_another_kind_is_no_record(folders: tuple[Path, Path]) -> None:
    add(folders[0], record())
    for other in (signature(r=4096 * 9), signature(dtype="bfloat16"), signature(mode="b")):
        assert chosen(other)[1] == "default"
    assert chosen(signature(factor=3.0))[1] == "user record"  # a number in the code, not its shape
    assert chosen(signature(r=4096 * 8))[1] == "user record of r=4096,d=1024"


def test_a_config_that_is_no_longer_legal_is_passed_over(folders: tuple[Path, Path]) -> None:
    add(folders[0], record(config={"block_r": 16, "gone": 3}))
    assert chosen() == ("block_r=64", "default")


def test_kernels_that_call_others(folders: tuple[Path, Path]) -> None:
    assert scaled.gradient is not None
    backward = scaled.gradient_signature(signature())
    add(folders[1], record(block=32))
    assert scaled.gradient.default_config(backward, "v5e") == {"scaled.block_r": 32}
    assert scaled.gradient.config_origin(backward, "v5e") == "scaled: shipped record"
    assert scaled.gradient.declared_config(backward, "v5e") == {"scaled.block_r": 64}
    add(folders[0], record(kernel=scaled.gradient.name, config={"scaled.block_r": 8}))
    assert scaled.gradient.default_config(backward, "v5e") == {"scaled.block_r": 8}
    assert scaled.gradient.config_origin(backward, "v5e") == "user record"


def test_an_unknown_choice_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUKERN_RECORDS", "mine")
    with pytest.raises(ConfigError) as caught:
        chosen(signature(r=512))
    assert str(caught.value) == (
        "environment[config]: TPUKERN_RECORDS='mine'; expected one of ['all', 'user', 'shipped', 'off']. "
        "Unset TPUKERN_RECORDS or mend it."
    )


def test_what_explain_says(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch on a chip, as far as it goes without one: up to what torch_tpu is given."""

    class Entry:
        def register(self, *_: object) -> None: ...
        def prepared(self, name: str, fingerprint: str, like: object, tally: object) -> object:
            return lambda tensors: None

    import torch

    monkeypatch.setattr(running.torch_tpu_adapter, "kernel_entry", Entry)
    monkeypatch.setattr(running.device, "start", lambda: "tpu")
    monkeypatch.setattr(running.device, "target", lambda: tpukern.target("v5e"))
    add(folders[1], record(r=2048, block=32))
    x = torch.empty(4096, 1024, device="meta")
    for given, config, origin in (
        ({}, "block_r=32", "shipped record of r=2048,d=1024"),
        ({"block_r": 16}, "block_r=16", "given"),
        ({"config": "block_r=8"}, "block_r=8", "given"),
        ({"mode": "b"}, "block_r=64", "default"),
    ):
        prepared = running.prepare(running.Request.read(scaled, [x], given, {}), on_cpu=False)
        assert (prepared.config, prepared.origin) == (config, origin)


def test_graphs_of_torch_compile_depend_on_records(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "target", lambda: tpukern.target("v5e"))
    before = tagging.fingerprint()
    assert tagging.fingerprint() == before
    add(folders[0], record())
    assert tagging.fingerprint() != before
    monkeypatch.setattr(device, "target", lambda: tpukern.target("v6e"))
    other = tagging.fingerprint()
    add(folders[0], record(block=8, us=1.0))
    assert tagging.fingerprint() == other


# --- what is kept ------------------------------------------------------------------------------------------------------


def test_the_better_of_two_stays(folders: tuple[Path, Path]) -> None:
    store = Store()
    store.add([record(block=8, us=10.0)])
    for fields, wins in (
        ({"us": 9.0}, True),
        ({"us": 9.5, "date": "2027-01-01T00:00:00Z"}, False),  # same versions: the shorter time
        ({"us": 20.0, "date": "2027-01-01T00:00:00Z", "versions": {"libtpu": "0.0.52"}}, True),  # another compiler: the newer
        ({"us": 1.0, "source": "roofline", "date": "2028-01-01T00:00:00Z"}, False),
        ({"us": 30.0, "source": "measured", "samples": (29.0, 30.0, 31.0)}, True),
    ):
        new = record(block=256, **fields)
        before = store.read("scaled", "v5e")
        store.add([new])
        assert store.read("scaled", "v5e") == ((new,) if wins else before), fields
    store.add([record(r=8), record(target="v6e")])
    assert len(store.all()) == 3


def test_an_empty_folder_and_round_trip(folders: tuple[Path, Path]) -> None:
    store = Store()
    assert store.all() == ()
    assert store.read("scaled", "v5e") == ()
    full = record(samples=(1.0, 2.0), default_us=12.5, workload="w", tried=5, failed=1, space=8, verified="v", digest="a")
    (path,) = store.add([full])
    assert path == folders[0] / "v5e" / "scaled.json"
    assert store.read("scaled", "v5e") == (full,)
    assert [p.name for p in path.parent.iterdir() if p.suffix != ".lock"] == ["scaled.json"]


def corrupt(path: Path, how: str) -> None:
    text = path.read_text()
    broken = {
        "cut": text[: len(text) // 2],
        "changed": text.replace('"block_r": 16', '"block_r": 24'),
        "empty": "",
        "list": "[]",
        "format": text.replace('"format": 1', '"format": 2'),
    }
    path.write_text(broken[how])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("cut", None),
        ("changed", "its checksum does not fit: it was cut short, or changed by hand"),
        ("empty", None),
        ("list", "it is no file of records"),
        ("format", "it has format 2; this tpukern reads 1"),
    ],
)
def test_a_corrupt_file_is_set_aside(folders: tuple[Path, Path], how: str, reason: str | None) -> None:
    (path,) = Store().add([record()])
    corrupt(path, how)
    before = path.read_bytes()
    with pytest.warns(RuntimeWarning, match=r"tpukern\[records\]: .*scaled.json cannot be read") as seen:
        assert chosen() == ("block_r=64", "default")
    if reason is not None:
        assert str(seen[0].message) == (
            f"tpukern[records]: {path} cannot be read ({reason}) and is left out. Run tpukern tune again, or restore it."
        )
    assert path.read_bytes() == before  # reading changes nothing
    with pytest.warns(RuntimeWarning, match="it is kept as scaled.json.corrupt-.*, and a new one begun"):
        Store().add([record(r=8)])
    (aside,) = path.parent.glob("*.corrupt-*")
    assert aside.read_bytes() == before
    assert Store().all() == (record(r=8),)


WRITER = """
import sys
from tpukern.autotune.recording import Record, Store
first, count = int(sys.argv[1]), int(sys.argv[2])
for r in range(first, first + count):
    Store().add([Record(kernel="scaled", target="v5e", inputs=("float32",), statics={}, sizes={"r": r}, config={"block_r": 8},
                        us=1.0, source="replay", verified="x" * 2000)])
    print(r, flush=True)
"""


def writer(first: int, count: int) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", WRITER, str(first), str(count)], stdout=subprocess.PIPE, text=True)


def test_concurrent_writers_lose_nothing() -> None:
    processes = [writer(1 + 1000 * at, 12) for at in range(4)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    found = {r.sizes["r"] for r in Store().all()}
    assert found == {1 + 1000 * at + turn for at in range(4) for turn in range(12)}


def test_a_killed_writer_loses_nothing() -> None:
    for turn in range(3):
        process = writer(1 + 1000 * turn, 1000)
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(4 + turn)]
        os.kill(process.pid, signal.SIGKILL)
        said += [int(line) for line in process.communicate()[0].split()]
        assert set(said) <= {r.sizes["r"] for r in Store().all()}
    Store().add([record()])  # the dead one's lock is gone with it
    assert record() in Store().all()


def test_a_full_disk_loses_nothing(folders: tuple[Path, Path]) -> None:
    Store().add([record()])
    code = """
import resource, signal
from tpukern.autotune.recording import Record, Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    Store().add([Record(kernel="scaled", target="v5e", inputs=(), statics={}, sizes={}, config={}, us=1.0, source="replay",
                        verified="x" * 5000)])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path = folders[0] / "v5e" / "scaled.json"
    assert done.stdout.strip() == (
        f"RecordError: scaled[records] on v5e: {path} cannot be written: File too large; expected a folder with space that can "
        "be written. What was recorded before is untouched. Mend it, or set TPUKERN_RECORDS_DIR, and run again: no result is "
        "lost."
    )
    assert Store().all() == (record(),)
    assert list(path.parent.glob("*.tmp")) == []


def test_a_lock_that_is_never_given_back(monkeypatch: pytest.MonkeyPatch, folders: tuple[Path, Path]) -> None:
    import filelock

    Store().add([record()])
    monkeypatch.setattr(recording, "_LOCK_S", 0.01)
    place = folders[0] / "v5e" / ".scaled.json.lock"
    with filelock.FileLock(place), pytest.raises(RecordError) as caught:
        Store().add([record(r=8)])
    assert f"another process has held {place} for 0.01 s" in str(caught.value)
    assert Store().all() == (record(),)


def test_names_that_would_leave_the_folder() -> None:
    value = record().as_json()
    for field in ("kernel", "target"):
        with pytest.raises(ValueError, match="no record"):
            Record.of_json({**value, field: "../../x"})


# --- the command -------------------------------------------------------------------------------------------------------


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, ["records", *words])
    return done.exit_code, done.stdout, done.stderr


def test_export_import_merge_diff_and_list(folders: tuple[Path, Path], tmp_path: Path) -> None:
    add(folders[0], record(), record(r=8, target="v6e"))
    one, two, both = (str(tmp_path / name) for name in ("one.json", "two.json", "both.json"))
    assert run("export", one)[:2] == (0, f"2 records written to {one}\n")
    add(folders[0], record(block=512, us=5.0), record(r=16, block=8))
    assert json.loads(run("export", two, "--json")[1]) == {"path": two, "records": 3}
    status, text, _ = run("diff", one, two, "--json")
    assert status == 1
    assert [(row["change"], row["sizes"], row["config"], row["us"]) for row in json.loads(text)] == [
        ("added", "r=16,d=1024,mode=a", "block_r=8", "10.0 (replay)"),
        ("changed", "r=4096,d=1024,mode=a", "block_r=16 -> block_r=512", "10.0 (replay) -> 5.0 (replay)"),
    ]
    assert run("diff", one, one)[0] == 0
    assert run("merge", one, two, "-o", both)[1] == f"3 records written to {both}\n"
    for path in folders[0].glob("*/*.json"):
        path.unlink()
    assert json.loads(run("import", one, "--json")[1]) == {"path": str(folders[0]), "read": 2, "changed": 2}
    assert run("import", both)[1] == f"3 records read, 2 of them new or better than what {folders[0]} had\n"
    assert json.loads(run("import", str(folders[0]), "--json")[1])["changed"] == 0
    add(folders[1], record(block=32))
    listed = json.loads(run("list", "--json")[1])
    assert [row["layer"] for row in listed] == ["user"] * 3 + ["shipped"]
    assert [row["config"] for row in json.loads(run("list", "--target", "v6e", "--json")[1])] == [{"block_r": 16}]
    assert "r=4096,d=1024,mode=a" in run("list")[1]
    assert run("export", both, "--layer", "shipped")[1] == f"1 records written to {both}\n"


def test_files_that_are_none(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    assert run("import", str(other))[::2] == (
        1,
        f"error: {other}[records]: it cannot be read: No such file or directory; expected a file of 'tpukern records export', "
        "or a folder of records.\n",
    )
    other.write_text("{}")
    assert "it is no file of records" in run("diff", str(other), str(other))[2]
    assert run("export", str(tmp_path / "no" / "file"))[2] == (
        f"error: {tmp_path / 'no' / 'file'}[records]: it cannot be written: No such file or directory; expected a place that "
        "can be written.\n"
    )


def test_a_config_reads_back_as_it_was(folders: tuple[Path, Path]) -> None:
    add(folders[0], record(block=8))
    assert isinstance(scaled.default_config(signature(), "v5e"), Config)
    ((loaded),) = Store().all()
    assert dict(loaded.config) == {"block_r": 8}
