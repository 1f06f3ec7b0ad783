"""How JAX is brought up beside a user's own use of it, and what the environment says."""

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from tpukern import environment, jax_adapter
from tpukern.errors import ConfigError

JAX_VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")


def run(code: str, **variables: str) -> str:
    """Runs code in a Python of its own, outside the repository, and returns what it prints."""
    env = {k: v for k, v in os.environ.items() if k not in JAX_VARIABLES} | variables
    program = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(program, env=env, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_jax_starts_no_tpu_client_and_loads_no_libtpu():
    said = run(
        """
        from tpukern import jax_adapter
        jax = jax_adapter.load()
        print(jax.config.jax_platforms, jax.default_backend())
        print("libtpu" in open("/proc/self/maps").read())
        """
    )
    assert said.split() == ["cpu", "cpu", "False"]


BACKEND_UP = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.devices()
jax.config.update("jax_platforms", None)
"""


@pytest.mark.parametrize(
    ("before", "variables", "expected"),
    [
        ("", {"JAX_PLATFORMS": "cpu,tpu"}, "cpu,tpu"),
        ("import jax; jax.config.update('jax_platforms', 'tpu')", {}, "tpu"),
        (BACKEND_UP, {}, "None"),
    ],
    ids=["environment", "config", "backend already up"],
)
def test_what_the_user_chose_stands(before, variables, expected):
    said = run(f"{before}\nfrom tpukern import jax_adapter\nprint(jax_adapter.load().config.jax_platforms)", **variables)
    assert said == expected


TPU_HOST = """
import jax, sys
from jax._src import cloud_tpu_init
cloud_tpu_init.running_in_cloud_tpu_vm = True
jax.config.update("jax_platforms", "tpu,cpu")  # what JAX sets by itself on a TPU host
{more}
from tpukern import jax_adapter
print(jax_adapter.load().config.jax_platforms)
"""


def test_on_a_tpu_host_jax_keeps_the_chip_unless_torch_tpu_owns_it():
    assert run(TPU_HOST.format(more="")) == "tpu,cpu"
    assert run(TPU_HOST.format(more="sys.modules['torch_tpu'] = sys")) == "cpu"
    assert run(TPU_HOST.format(more="sys.modules['torch_tpu'] = sys"), JAX_PLATFORMS="tpu,cpu") == "tpu,cpu"


def test_importing_the_compile_road_loads_no_jax():
    code = """
    import sys
    import tpukern.compiling, tpukern.cache, tpukern.environment
    print([m for m in ("jax", "jaxlib", "torch", "libtpu", "numpy") if m in sys.modules])
    """
    assert run(code) == "[]"


@pytest.mark.parametrize(("version", "accepted"), [("0.10.1", False), ("0.10.2", True), ("0.12.9", True), ("0.13.0", False)])
def test_the_version_of_jax_is_checked(monkeypatch, version, accepted):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    load = jax_adapter.load.__wrapped__
    if accepted:
        assert load().__name__ == "jax"
        return
    with pytest.raises(ConfigError) as caught:
        load()
    assert str(caught.value) == (
        f"jax[config]: jax {version}; expected jax>=0.10.2,<0.13. pip install 'jax>=0.10.2,<0.13' 'jaxlib>=0.10.2,<0.13'"
    )


def serialized(*parts: bytes) -> bytes:
    """What libtpu 0.0.51 writes around the configs of its HLO."""
    return b"\x00\x12junk".join(parts)


def test_scoped_vmem_is_the_largest_of_the_mosaic_kernels():
    kernel = (
        b'{"custom_call_config":{"body":"TUzvUg==","needs_layout_passes":true},'
        b'"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"%d"}],"retry_config":{}}'
    )
    fusion = b'{"flag_configs":[],"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"999999"}]}'
    empty = b'{"custom_call_config":{"body":"TUzvUg=="},"used_scoped_memory_configs":[]}'
    smem = kernel.replace(b'"memory_space":"1"', b'"memory_space":"4"') % 77777
    assert jax_adapter.scoped_vmem_bytes(serialized(kernel % 4096, fusion, kernel % 8192, empty, smem)) == 8192
    assert jax_adapter.scoped_vmem_bytes(serialized(fusion, empty)) == 0


def test_settings_that_change_a_trace_are_named():
    jax = jax_adapter.load()
    before = jax_adapter.trace_settings()
    assert before["jax_enable_x64"] is False
    with jax.default_matmul_precision("highest"):
        assert jax_adapter.trace_settings() != before
    assert jax_adapter.trace_settings() == before


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TPUKERN_CACHE_DIR", str(tmp_path))
    assert environment.cache_folder() == tmp_path
    monkeypatch.setenv("TPUKERN_CACHE_DIR", "~/here")
    assert environment.cache_folder() == pathlib.Path.home() / "here"
    monkeypatch.delenv("TPUKERN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_folder() == tmp_path / "tpukern"


@pytest.mark.parametrize(
    ("name", "read", "text", "expected"),
    [
        ("TPUKERN_CACHE_MIB", environment.cache_limit_bytes, "1.5", 1536 * 1024),
        ("TPUKERN_CACHE_MIB", environment.cache_limit_bytes, None, 256 * 1024 * 1024),
        ("TPUKERN_COMPILE_WORKERS", environment.compile_workers, "3", 3),
        ("TPUKERN_COMPILE_TIMEOUT", environment.compile_timeout_s, "0.5", 0.5),
        ("TPUKERN_COMPILE_TIMEOUT", environment.compile_timeout_s, "", 600),
    ],
)
def test_numbers_from_the_environment(monkeypatch, name, read, text, expected):
    monkeypatch.delenv(name, raising=False)
    if text is not None:
        monkeypatch.setenv(name, text)
    assert read() == expected


@pytest.mark.parametrize("text", ["many", "0", "-1", "nan", "inf"])
def test_numbers_that_are_none(monkeypatch, text):
    monkeypatch.setenv("TPUKERN_COMPILE_WORKERS", text)
    with pytest.raises(ConfigError) as caught:
        environment.compile_workers()
    assert str(caught.value) == (
        f"environment[config]: TPUKERN_COMPILE_WORKERS={text!r}; expected a number, 1 or more."
        " Unset TPUKERN_COMPILE_WORKERS or mend it."
    )


def test_workers_see_only_what_we_set(monkeypatch, tmp_path):
    for name in ("TPU_LIBRARY_PATH", "LIBTPU_INIT_ARGS", "XLA_FLAGS", "JAX_DUMP_IR_TO", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("HOME", "/somewhere")
    env = environment.worker_environment(tmp_path)
    theirs = [name for name, text in env.items() if text == "theirs"]
    assert theirs == []
    assert env["HOME"] == "/somewhere"
    assert (env["JAX_PLATFORMS"], env["TPU_MIN_LOG_LEVEL"], env["TMPDIR"]) == ("cpu", "3", str(tmp_path))
    assert (env["TPU_SKIP_MDS_QUERY"], env["ALLOW_MULTIPLE_LIBTPU_LOAD"]) == ("1", "1")


def test_variables_are_changed_for_a_while(monkeypatch):
    monkeypatch.setenv("TPUKERN_TEST_A", "before")
    monkeypatch.delenv("TPUKERN_TEST_B", raising=False)

    def now():
        return [environment.value(f"TPUKERN_TEST_{letter}") for letter in "AB"]

    with environment.changed({"TPUKERN_TEST_A": None, "TPUKERN_TEST_B": "new"}):
        assert now() == [None, "new"]
    assert now() == ["before", None]

    with contextlib.suppress(RuntimeError), environment.changed({"TPUKERN_TEST_A": "inner"}):
        raise RuntimeError
    assert now() == ["before", None]
