"""`tpukern.estimate`: predicted times, where they come from, and what happens where they cannot be had."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import tpukern
from tpukern.autotune import bundles, chips, estimating, roofline
from tpukern.cli.app import cli
from tpukern.errors import CompileError, ConfigError
from tpukern.kernels import flash_attention, matmul, rms_norm

SIZE = 1024
BLOCK = tpukern.Block(4096)


def square(size: int = SIZE) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (jax.ShapeDtypeStruct((size, size), jnp.bfloat16),) * 2


@pytest.fixture(scope="module")
def small_blocks() -> estimating.Estimate:
    return tpukern.estimate(matmul, *square(), target="v5e", config={"block_m": 128, "block_n": 128, "block_k": 128})


def test_a_matmul_by_replay(small_blocks: estimating.Estimate) -> None:
    """JAX's documentation gives 297.7 us of wall time for this one on a v5e, of which about 110 us are dispatch."""
    e = small_blocks
    assert (e.kernel, e.direction, e.target, e.source, e.workload) == ("matmul", "forward", "v5e", "replay", None)
    assert 0.95 * 187.7 < e.us < 1.05 * 187.7
    assert e.flops == 2 * SIZE**3
    assert e.mxu_share == pytest.approx(e.flops / (e.us * 1e-6 * 197e12))
    assert e.hbm_bytes == 2 * (8 * 8 * 8 * 2 * 128 * 128) + 2 * SIZE * SIZE  # a block of each operand a step, y once
    assert e.us == pytest.approx(e.compute_us + (e.wait_us or 0))
    assert e.bound_by == "latency"
    assert [part.name for part in e.parts] == ["matmul.1"]
    assert e.gaps == ()
    assert 0 < (e.vmem_bytes or 0) < e.vmem_limit_bytes
    assert e.cycles == round(e.us * 1e-6 * chips.CHIPS["v5e"].clock_hz)


def test_larger_blocks_are_faster(small_blocks: estimating.Estimate) -> None:
    found = tpukern.estimate(matmul, *square(), target="v5e", config={"block_m": 512, "block_n": 1024, "block_k": 1024})
    assert found.us < small_blocks.us / 5


def test_a_second_time_nothing_is_compiled(small_blocks: estimating.Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(estimating.worker_pool, "WorkerPool", refuse)
    config = {"block_m": 128, "block_n": 128, "block_k": 128}
    assert tpukern.estimate(matmul, *square(), target="v5e", config=config) == small_blocks


def test_a_schedule_that_cannot_be_read_leaves_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "TESTED_LIBTPU", ("0.0.1",))
    bound = matmul.bind(*square(512), target="v6e")
    (found,) = estimating.estimate_many([estimating.Job(bound=bound, target=tpukern.target("v6e"))], use_cache=False)
    assert isinstance(found, estimating.Estimate)
    assert (found.source, found.wait_us, found.parts) == ("roofline", None, ())
    assert found.gaps[0].startswith("no replay: libtpu ")
    assert found.us == pytest.approx(max(found.compute_us, found.hbm_us))


def test_what_the_compiler_refuses_is_an_error() -> None:
    def greedy(x: tpukern.Ref = tpukern.In("r d"), y: tpukern.Ref = tpukern.Out("r d"), *, r: tpukern.Dim = BLOCK) -> None:
        y[...] = x[...]

    kernel = tpukern.kernel(vmem_limit_bytes=2**27)(greedy)
    wide = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    with pytest.raises(CompileError, match=r"greedy\[compile\] on v5e: .* of VMEM needed; expected at most 128"):
        tpukern.estimate(kernel, wide, target="v5e")


def test_names_that_are_unknown() -> None:
    with pytest.raises(ConfigError, match=r"no workload 'llama3_8b_gat'.*Did you mean 'llama3_8b_gate'"):
        tpukern.estimate(matmul, workload="llama3_8b_gat", target="v5e")
    with pytest.raises(ConfigError, match="no target 'v7'"):
        tpukern.estimate(matmul, workload="llama3_8b_gate", target="v7")
    with pytest.raises(ConfigError, match="no direction 'sideways'"):
        tpukern.estimate(matmul, workload="llama3_8b_gate", direction="sideways", target="v5e")


def test_work_counts_what_is_fetched_again() -> None:
    bound = matmul.bind(*square(), target="v5e", block_m=512, block_n=512, block_k=1024)
    found = roofline.work(bound.calls)
    assert (found.flops, found.issued_flops) == (2 * SIZE**3, 2 * SIZE**3)
    x, y, out = 2 * 2 * SIZE * SIZE, 2 * 2 * SIZE * SIZE, 2 * SIZE * SIZE
    assert found.bytes in (x + y + out, x // 2 + y + out, x + y // 2 + out)  # the operand that stays from step to step
    assert found.gaps == ()
    wide = (jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2
    exact = roofline.work(matmul.bind(*wide, target="v5e").calls)
    assert exact.issued_flops == 6 * exact.flops


def test_dots_under_a_condition_are_a_gap() -> None:
    q = jax.ShapeDtypeStruct((1, 1, 512, 128), jnp.bfloat16)
    found = roofline.work(flash_attention.bind(q, q, q, causal=True, target="v5e").calls)
    assert any("dots under a condition" in gap for gap in found.gaps)


def test_the_command() -> None:
    words = ["estimate", "rms_norm", "--target", "v6e", "--shape", "r=256,d=1024", "--direction", "forward", "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["kernel"], row["direction"], row["target"], row["source"]) == ("rms_norm", "forward", "v6e", "replay")
    assert row["us"] > 0
    assert row["error"] is None
    assert {field.name for field in dataclasses.fields(estimating.Estimate)} <= set(row)
    table = CliRunner().invoke(cli, words[:-1])
    assert "replay" in table.stdout
    assert "Predicted, not measured." in table.stderr
    assert rms_norm.name in table.stdout
