"""The autotuner: what is tried, what wins, what is kept, and what is said where nothing can be found."""

import dataclasses
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import tpukern
from tpukern import compiling, worker_pool
from tpukern.autotune import estimating, measuring, recording, rejecting, searching, tuning, verifying
from tpukern.autotune.recording import Store
from tpukern.autotune.trials import Log, Trial
from tpukern.autotune.tuning import Budget, Problem, Tuner
from tpukern.cli.app import cli
from tpukern.compiling import Job
from tpukern.dsl import Config
from tpukern.errors import CompileError, ConfigError, DeviceError, TuneError

ROWS = tpukern.Block(8, 16, 32, 64, 128, 256, default=64)


def scaled_reference(x, *, factor):
    return x * factor


@tpukern.kernel(
    op="test_tune::scaled", reference=scaled_reference, workloads=(tpukern.Workload("small", dtype="float32", r=1024, d=256),)
)
def scaled(
    x: tpukern.Ref = tpukern.In("r d"), y: tpukern.Ref = tpukern.Out("r d"), *, factor: float = 2.0, r: tpukern.Dim = ROWS
) -> None:
    y[...] = x[...] * factor


@scaled.backward
def scaled_backward(dy: jax.Array, factor: float = 2.0) -> dict[str, jax.Array]:
    return {"dx": scaled(dy, factor=factor)}


SMALL = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
TIMES = {8: 80.0, 16: 40.0, 32: 30.0, 64: 35.0, 128: 20.0, 256: 25.0}  # by block


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TPUKERN_RECORDS_DIR", str(tmp_path / "records"))
    scaled.forget_defaults()
    assert scaled.gradient is not None
    scaled.gradient.forget_defaults()


class Compiler:
    """Stands in for the compiler and the replay: times by block, errors where told."""

    def __init__(self) -> None:
        self.tried: list[int] = []
        self.fails: dict[int, object] = {}
        self.source = "replay"
        self.after: Callable[[int], None] = lambda count: None

    def __call__(self, jobs: list[Job], *, on_result: Callable, **_: object) -> None:
        for place, job in enumerate(jobs):
            block = next(value for key, value in job.bound.config.items() if key.endswith("block_r"))
            self.tried.append(block)
            failure = self.fails.get(block)
            on_result(place, failure if failure is not None else self.estimate(job, block))
            self.after(len(self.tried))

    def estimate(self, job: Job, block: int) -> object:
        made = Trial(config=Config(job.bound.config), us=TIMES[block], source=self.source, samples=(TIMES[block],))
        return dataclasses.replace(made, reason="no replay: it is a stub") if self.source == "roofline" else made


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stub = Compiler()
    monkeypatch.setattr(estimating, "estimate_many", stub)
    return stub


def error(text: str) -> CompileError:
    return CompileError("scaled", text, target="v5e")


# --- a search ----------------------------------------------------------------------------------------------------------


def test_all_of_a_small_space_is_tried_the_default_first(compiler: Compiler) -> None:
    found = tpukern.tune(scaled, SMALL, target="v5e")
    assert compiler.tried[0] == 64
    assert sorted(compiler.tried) == [8, 16, 32, 64, 128, 256]
    assert (found.config, found.us, found.default_config, found.default_us) == ({"block_r": 128}, 20.0, {"block_r": 64}, 35.0)
    assert (found.space, found.tried, found.failures, found.stopped, found.source) == (6, 6, {}, "", "replay")
    assert found.speedup == 35 / 20
    assert found.verified == "interpret form against the reference at r=256,d=256, config block_r=128"
    (record,) = Store().all()
    assert (record.config, record.us, record.default_us, record.source) == ({"block_r": 128}, 20.0, 35.0, "replay")
    assert (record.samples, record.tried, record.failed, record.space) == ((20.0,), 6, 0, 6)
    assert record.versions.keys() == {"tpukern", "libtpu", "jax", "jaxlib"}
    assert record.digest == scaled.source_digest()
    assert record.code == tpukern.lower(scaled.bind(SMALL, target="v5e", block_r=128)).digest
    assert scaled.bind(SMALL, target="v5e").config == {"block_r": 128}  # what calls use from now on
    assert json.loads(json.dumps(found.as_json()))["config"] == {"block_r": 128}


def test_the_default_wins_a_tie_and_is_never_beaten_by_another_source(compiler: Compiler, monkeypatch) -> None:
    monkeypatch.setattr(tuning.verifying, "check", lambda *_: ("", "stub"))
    for block in TIMES:
        monkeypatch.setitem(TIMES, block, 5.0)
    assert tpukern.tune(scaled, SMALL, target="v5e").config == {"block_r": 64}
    compiler.fails[128] = Trial(config=Config(block_r=128), us=1.0, source="roofline", reason="no replay")
    assert tpukern.tune(scaled, SMALL, target="v5e", fresh=True).config == {"block_r": 64}


def test_a_budget_of_configs_and_of_time(compiler: Compiler) -> None:
    found = tpukern.tune(scaled, SMALL, target="v5e", budget=3, workers=1)
    assert (found.tried, found.stopped, len(compiler.tried)) == (3, "budget", 3)
    found = tpukern.tune(scaled, SMALL, target="v6e", budget=1)
    assert (found.config, found.us) == ({"block_r": 64}, 35.0)
    with Tuner(workers=1) as tuner:
        late = tuner.tune(Problem(kernel=scaled, signature=scaled.signature(SMALL), target=tpukern.target("v4")), deadline=0.0)
    assert (late.tried, late.stopped) == (1, "budget")


@pytest.mark.parametrize(
    ("text", "configs", "seconds"),
    [("40", 40, None), ("90s", None, 90), ("1.5m", None, 90), ("2 h", None, 7200), (None, None, None)],
)
def test_budgets(text: str | None, configs: int | None, seconds: float | None) -> None:
    assert Budget.parse(text) == Budget(configs=configs, seconds=seconds)


def test_words_that_are_no_budget_or_strategy() -> None:
    for bad in ("0", "-3", "ten", "5 days", True):
        with pytest.raises(ConfigError) as caught:
            Budget.parse(bad)
        assert str(caught.value) == (
            f"tune[config]: budget {bad!r}; expected a number of configs, or a time such as 90s, 10m or 2h."
        )
    with pytest.raises(ConfigError) as caught:
        tpukern.tune(scaled, SMALL, target="v5e", strategy="guess")
    assert str(caught.value) == "tune[config]: no strategy 'guess'; expected one of ['auto', 'exhaustive', 'optuna']."
    with pytest.raises(ConfigError, match="no target 'v9'"):
        tpukern.tune(scaled, SMALL, target="v9")
    with pytest.raises(ConfigError, match="no direction 'sideways'"):
        tpukern.tune(scaled, SMALL, target="v5e", direction="sideways")


def test_failures_are_results(compiler: Compiler) -> None:
    compiler.fails = {
        8: error("20.00 MiB of scoped VMEM needed"),
        16: error("no result after 120 s, and killed"),
        32: error("the compile worker ended with signal SIGSEGV"),
        128: error("5,000 MiB of memory held, the limit is 4,096 MiB, and killed"),
        64: error("Mosaic failed to compile"),
    }
    found = tpukern.tune(scaled, SMALL, target="v5e")
    assert found.config == {"block_r": 256}
    assert found.default_us is None
    assert found.speedup is None
    assert found.failures == {"VMEM": 1, "time-out": 1, "crash": 1, "memory": 1, "compiler": 1}
    assert {trial.config["block_r"]: trial.failure for trial in found.trials if trial.us is None}[16] == "time-out"
    (record,) = Store().all()
    assert (record.failed, record.default_us) == (5, None)


def test_a_space_whose_every_config_fails(compiler: Compiler) -> None:
    compiler.fails = {block: error("20.00 MiB of scoped VMEM needed") for block in TIMES} | {8: error("no result after 9 s")}
    with pytest.raises(TuneError) as caught:
        tpukern.tune(scaled, SMALL, target="v5e")
    assert str(caught.value) == (
        "scaled[tune] on v5e: every config fails of the 6 tried at scaled(x: float32[1024,256], factor=2.0) -> "
        "y: float32[1024,256]: 5 x VMEM, such as: scaled[compile] on v5e: 20.00 MiB of scoped VMEM needed; 1 x time-out, such "
        "as: scaled[compile] on v5e: no result after 9 s; expected one that can be used."
    )
    assert Store().all() == ()


def test_an_empty_space_says_which_rule_refuses_how_many(compiler: Compiler) -> None:
    def body(x: tpukern.Ref = tpukern.In("r d"), y: tpukern.Ref = tpukern.Out("r d"), *, r: tpukern.Dim = ROWS) -> None:
        y[...] = x[...]

    def refuse(config, signature, target):
        return "blocks below 64 are slow" if config["block_r"] < 64 else "no chip is good enough"

    picky = tpukern.kernel(reject=refuse, name="picky")(body)
    with pytest.raises(TuneError) as caught:
        tpukern.tune(picky, SMALL, target="v5e")
    assert str(caught.value) == (
        "picky[tune] on v5e: none of its 6 configs is legal at picky(x: float32[1024,256]) -> y: float32[1024,256]: "
        "3 x blocks below 64 are slow; 3 x no chip is good enough; expected one that is. Declare other choices for its blocks, "
        "or tune another shape."
    )


def test_rooflines_are_not_chosen_by(compiler: Compiler) -> None:
    compiler.source = "roofline"
    with pytest.raises(TuneError) as caught:
        tpukern.tune(scaled, SMALL, target="v5e")
    assert str(caught.value) == (
        "scaled[tune] on v5e: no schedule can be replayed (no replay: it is a stub); expected one: a roofline is the same for "
        "most configs and tells nothing about them. Measure on a TPU with --device, or install the libtpu that the replay "
        "knows."
    )


def test_no_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "libtpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(compiling.importlib.metadata, "version", version)
    with pytest.raises(CompileError) as caught:
        tpukern.tune(scaled, SMALL, target="v5e")
    assert str(caught.value) == ("tpukern[compile]: libtpu, the TPU compiler, is not installed. pip install 'tpukern[compile]'")


def test_a_wrong_winner_is_passed_over(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def check(kernel, signature, config):
        checked.append(config["block_r"])
        return ("y is off by 9 ULP" if config["block_r"] in (128, 256) else "", "by a stub")

    monkeypatch.setattr(tuning.verifying, "check", check)
    found = tpukern.tune(scaled, SMALL, target="v5e")
    assert (checked, found.config) == ([128, 256, 32], {"block_r": 32})
    assert found.failures == {"numerics": 2}
    monkeypatch.setattr(tuning.verifying, "check", lambda *_: ("y is off by 9 ULP", "by a stub"))
    with pytest.raises(TuneError, match=r"the best 4 configs give wrong results \(by a stub\) of the 6 tried .*4 x numerics"):
        tpukern.tune(scaled, SMALL, target="v5e", fresh=True)


# --- interrupted, resumed, full ----------------------------------------------------------------------------------------


def test_what_was_tried_is_not_tried_again(compiler: Compiler) -> None:
    compiler.fails[16] = error("no result after 120 s, and killed")

    def interrupt(count: int) -> None:
        if count == 4:
            raise KeyboardInterrupt

    compiler.after = interrupt
    with pytest.raises(KeyboardInterrupt):
        tpukern.tune(scaled, SMALL, target="v5e", workers=1)
    assert Store().all() == ()
    first, compiler.tried = compiler.tried, []
    compiler.after = lambda count: None
    found = tpukern.tune(scaled, SMALL, target="v5e", workers=1)
    assert len(first) == 4
    assert set(first) | set(compiler.tried) == set(TIMES)
    assert not set(first) & set(compiler.tried)
    assert sum(trial.known for trial in found.trials) == 4
    assert found.config == {"block_r": 128}
    compiler.tried = []
    assert tpukern.tune(scaled, SMALL, target="v5e").us == found.us
    assert compiler.tried == []
    tpukern.tune(scaled, SMALL, target="v5e", fresh=True)
    assert len(compiler.tried) == 6


def test_a_log_that_was_cut_short(tmp_path: Path) -> None:
    log = Log("scaled", "v5e", tmp_path)
    trial = Trial(config=Config(block_r=8), us=1.0, source="replay")
    log.put("a", {}, trial)
    log.put("b", {}, dataclasses.replace(trial, us=2.0))
    log.path.write_bytes(log.path.read_bytes()[:-20])
    again = Log("scaled", "v5e", tmp_path)
    assert again.get("a") == dataclasses.replace(trial, known=True)
    assert again.get("b") is None
    again.put("b", {}, trial)
    assert next(iter(Log("scaled", "v5e", tmp_path).entries()))["key"] == "a"


def test_a_record_that_cannot_be_written_loses_no_result(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(recording.os, "fsync", full)
    found = tpukern.tune(scaled, SMALL, target="v5e")
    assert found.config == {"block_r": 128}
    assert found.path is None
    assert found.problem is not None
    assert "cannot be written: No space left on device" in found.problem
    monkeypatch.undo()


def test_a_log_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "v5e").write_text("a file where a folder should be")
    log = Log("scaled", "v5e", tmp_path)
    log.put("a", {}, Trial(config=Config(), us=1.0))
    assert log.problem is not None
    assert log.problem.startswith(f"{log.path} cannot be written: ")


# --- kernels that call others ------------------------------------------------------------------------------------------


def test_a_gradient_is_tuned_by_its_parts(compiler: Compiler) -> None:
    found = tpukern.tune(scaled, SMALL, target="v5e", direction="backward")
    assert (found.kernel, found.direction, found.config) == (scaled.gradient.name, "backward", {"scaled.block_r": 128})
    assert found.tried == 6 + 2  # the part's configs; the whole with its default and with the best
    assert [trial.config["scaled.block_r"] for trial in found.trials] == [64, 128]
    assert {record.kernel for record in Store().all()} == {"scaled", scaled.gradient.name}


# --- Optuna ------------------------------------------------------------------------------------------------------------


def test_optuna_finds_the_valley_of_a_large_space() -> None:
    pytest.importorskip("optuna")
    sides = (8, 16, 32, 64, 128, 256, 512, 1024)
    space = [Config(block_m=m, block_n=n, block_k=k) for m in sides for n in sides for k in sides if m * n <= 2**16]

    def us(config: Config) -> float:
        return 10 + sum(abs(at - sides.index(config[f"block_{name}"])) for name, at in (("m", 4), ("n", 5), ("k", 2)))

    strategy = searching.strategy_of("auto", "wide", space)
    assert isinstance(strategy, searching.Guided)
    tried: dict[Config, float] = {}
    while len(tried) < searching.SMALL:
        for config in strategy.ask(4):
            assert config in space
            assert config not in tried
            tried[config] = us(config)
            strategy.tell(config, None if config["block_k"] == 1024 else tried[config])
    ranks = sorted(map(us, space))
    assert min(tried.values()) <= ranks[len(space) // 50]  # the best 2%


def test_optuna_asks_for_everything_in_the_end() -> None:
    pytest.importorskip("optuna")
    space = [Config(block_m=m) for m in range(8, 8 * 20, 8)]
    strategy = searching.Guided("wide", space)
    asked = strategy.ask(1000)
    assert sorted(asked, key=str) == sorted(space, key=str)
    assert strategy.ask(1) == []


def test_optuna_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(TuneError) as caught:
        searching.strategy_of("auto", "wide", [Config(block_m=m) for m in range(65)])
    assert str(caught.value) == (
        "wide[tune]: a space of 65 configs is searched with Optuna, which is not installed. pip install 'tpukern[tune]', or "
        "try them all: strategy='exhaustive'"
    )
    assert isinstance(searching.strategy_of("exhaustive", "wide", []), searching.Listed)


# --- refused before it is compiled -------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_without_a_compile() -> None:
    def body(x: tpukern.Ref = tpukern.In("r d"), y: tpukern.Ref = tpukern.Out("r d"), *, r: tpukern.Dim = ROWS) -> None:
        y[...] = x[...]

    copied = tpukern.kernel(name="copied")(body)
    wide = jax.ShapeDtypeStruct((4096, 16384), jnp.float32)
    for block, refused in ((256, True), (64, False)):
        job = Job(bound=copied.bind(wide, target="v5e", block_r=block), target=tpukern.target("v5e"))
        (call,) = job.bound.calls
        assert rejecting.floor_bytes(call, job.target) == 2 * 2 * block * 16384 * 4
        if not refused:
            rejecting.check(job)
            continue
        with pytest.raises(CompileError) as caught:
            rejecting.check(job)
        assert str(caught.value) == (
            "copied[compile] on v5e: for its blocks and scratch alone 64.00 MiB of scoped VMEM needed; expected at most 16.00 "
            "MiB. Choose smaller blocks, or raise vmem_limit_bytes."
        )


def test_a_worker_that_holds_too_much_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker that answers that it is ready, and to a task not at all."""
    script = tmp_path / "worker.py"
    script.write_text("import sys, time\nprint('{\"ready\": {}}', flush=True)\nsys.stdin.readline()\ntime.sleep(600)\n")
    shell = tmp_path / "python"
    shell.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))}\n")
    shell.chmod(0o755)
    monkeypatch.setattr(worker_pool.sys, "executable", str(shell))
    monkeypatch.setattr(worker_pool, "_resident_bytes", lambda process: 3 << 30)
    with worker_pool.WorkerPool(1, 600, memory_bytes=2 << 30) as pool:
        pool.submit(worker_pool.Task(tag=7, module=b"", topology="", options={}))
        (outcome,) = pool.collect()
    assert (outcome.tag, outcome.failure) == (7, "3,072 MiB of memory held, the limit is 2,048 MiB, and killed")
    assert tuning._failed(Config(), error(outcome.failure)).failure == "memory"


def test_what_a_process_holds() -> None:
    assert worker_pool._resident_bytes(os.getpid()) > 1 << 20
    assert worker_pool._resident_bytes(2**30) == 0


# --- numerics and hardware ---------------------------------------------------------------------------------------------


def test_wrong_numerics_are_seen() -> None:
    def body(x: tpukern.Ref = tpukern.In("r d"), y: tpukern.Ref = tpukern.Out("r d"), *, r: tpukern.Dim = ROWS) -> None:
        y[...] = x[...] * (2.0 if r.block < 64 else 2.001)

    for reference in (lambda x: x * 2, None):
        wrong = tpukern.kernel(name="wrong", reference=reference)(body)
        signature = wrong.signature(SMALL)
        assert verifying.check(wrong, signature, Config(block_r=32))[0].startswith("" if reference else NOT_ITS_DEFAULT)
        said, how = verifying.check(wrong, signature, Config(block_r=128))
        assert said.startswith("y is off by") if reference else said == ""
        assert how.startswith("interpret form against " + ("the reference" if reference else "its own default config"))


NOT_ITS_DEFAULT = "y differs from the default config's by 0.00"


def test_no_tpu_to_measure_on() -> None:
    with pytest.raises(DeviceError) as caught:
        measuring.measure([], lambda place, found: None)
    assert str(caught.value) == (
        "tune[device]: no TPU to measure on; expected one that JAX uses. Leave --device out to estimate."
    )


# --- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    text = Path(__file__).read_text().split("\nSMALL =")[0]
    path.write_text(text.replace('op="test_tune::scaled", ', "").replace('    op="test_tune::scaled",\n', ""))
    return f"{path}:scaled"


def test_the_command(compiler: Compiler, mine: str) -> None:
    done = CliRunner().invoke(cli, ["tune", mine, "--target", "v5e,v6e", "--json"])
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["kernel"], row["target"]) for row in rows] == [
        ("scaled", "v5e"), ("scaled", "v6e"), ("scaled_backward", "v5e"), ("scaled_backward", "v6e"),
    ]  # fmt: skip
    assert rows[0]["config"] == {"block_r": 128}
    assert [record.target for record in Store().all()] == ["v5e", "v5e", "v6e", "v6e"]
    done = CliRunner().invoke(cli, ["tune", mine, "--target", "v5e", "--direction", "forward"])
    assert "1.75x" in done.stdout
    assert "[1/1] scaled small v5e: 20.0 us, default 35.0, 6 configs in" in done.stderr
    assert "1 of 1 tuned, 6 configs tried.\nTimes are predicted, not measured.\n" in done.stderr


def test_the_command_where_nothing_works(compiler: Compiler, mine: str) -> None:
    compiler.fails = {block: error("20.00 MiB of scoped VMEM needed") for block in TIMES}
    done = CliRunner().invoke(cli, ["tune", mine, "--target", "v5e", "--direction", "forward"])
    assert done.exit_code == 1
    assert "scaled small v5e: failed: scaled[tune] on v5e: every config fails of the 6 tried" in done.stdout
    assert "0 of 1 tuned" in done.stderr
    done = CliRunner().invoke(cli, ["tune", mine, "--target", "v5e", "--budget", "soon"])
    assert done.stderr == (
        "error: tune[config]: budget 'soon'; expected a number of configs, or a time such as 90s, 10m or 2h.\n"
    )
    assert CliRunner().invoke(cli, ["tune", mine, "--target", "v5", "--workload", "x"]).exit_code == 1
    done = CliRunner().invoke(cli, ["tune", mine, "--target", "v5e", "--workload", "small", "--shape", "r=8,d=8"])
    assert done.exit_code == 2


def test_an_interrupt_keeps_what_is_done(compiler: Compiler, mine: str) -> None:
    def interrupt(count: int) -> None:
        if count == 9:
            raise KeyboardInterrupt

    compiler.after = interrupt
    done = CliRunner().invoke(cli, ["tune", mine, "--target", "v5e,v6e", "--direction", "forward"])
    assert done.exit_code == 130
    assert "1 of 2 searches ended; what was tried of the next is kept. The same command goes on from there." in done.stderr
    assert [record.target for record in Store().all()] == ["v5e"]
    compiler.after = lambda count: None
    before = len(compiler.tried)
    done = CliRunner().invoke(cli, ["tune", mine, "--target", "v5e,v6e", "--direction", "forward"])
    assert done.exit_code == 0
    assert len(compiler.tried) == before + 3


# --- for real ----------------------------------------------------------------------------------------------------------


def test_a_tiny_space_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")

    def body(
        x: tpukern.Ref = tpukern.In("r d"),
        y: tpukern.Ref = tpukern.Out("r d"),
        *,
        r: tpukern.Dim = tpukern.Block(8, 64, 512, default=8),
    ) -> None:
        y[...] = x[...] * 2.0

    doubled = tpukern.kernel(name="doubled", reference=lambda x: x * 2)(body)
    wide = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
    found = tpukern.tune(doubled, wide, target="v5e", workers=1)
    assert found.config == {"block_r": 64}
    assert found.speedup is not None
    assert found.speedup > 1.1
    assert (found.source, found.failures, found.tried) == ("replay", {"VMEM": 1}, 3)
    assert doubled.default_config(doubled.signature(wide), "v5e") == {"block_r": 64}
    assert doubled.config_origin(doubled.signature(wide), "v5e") == "user record"
