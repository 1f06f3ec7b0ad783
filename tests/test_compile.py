"""Lowered -> Compiled: the real TPU compiler's figures and refusals, and what the cache spares."""

import dataclasses
import json
import re
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern import compiling, lowering, worker_pool
from tpukern.compiling import Job
from tpukern.dsl import Acc, Block, Dim, In, Out, Ref, dot, kernel
from tpukern.errors import ConfigError
from tpukern.kernels import rms_norm
from tpukern.targets import MIB, TARGETS

pytest.importorskip("libtpu")
S = jax.ShapeDtypeStruct


@kernel(op="tests::product", dtypes=("bfloat16",))
def product(
    x: Ref = In("m k"), w: Ref = In("k n"), y: Ref = Out("m n"), acc: Ref = Acc("m n"), *,
    m: Dim = Block(128, 256), n: Dim = Block(128, 256), k: Dim = Block(128, 256),
) -> None:  # fmt: skip
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _():
        y[...] = acc[...].astype(y.dtype)


A, B = S((256, 512), jnp.bfloat16), S((512, 256), jnp.bfloat16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKERN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plain(function, *specs, name="demo"):
    """A plain JAX callable where a Bound is wanted."""
    owner = types.SimpleNamespace(name=name, source_digest=lambda: "none")
    return types.SimpleNamespace(kernel=owner, function=function, specs=specs, target=None, config={})


def copy(x, rows, **keywords):
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    grid = (x.shape[0] // rows,)
    out = S(x.shape, x.dtype)
    return pl.pallas_call(body, name="copy", grid=grid, in_specs=[spec], out_specs=spec, out_shape=out, **keywords)(x)


def overflowing():
    return plain(lambda x: copy(x, 2048), S((4096, 4096), jnp.float32), name="big")


def column():
    """A reshape that v5e's Mosaic refuses."""

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...].reshape(y_ref.shape)

    return plain(lambda x: pl.pallas_call(body, out_shape=S((256, 1), x.dtype))(x), S((1, 256), jnp.bfloat16), name="column")


def raising():
    def function(x):
        raise ValueError("boom")

    return plain(function, S((8, 128), jnp.float32), name="raising")


def no_workers(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker_pool.WorkerPool, "__init__", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


MATRIX, TALL = S((4096, 1024), jnp.float32), S((65536, 1024), jnp.float32)  # the tall one fits no chip's VMEM


def tables_in_megablox():
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    specs = (S((512, 512), jnp.bfloat16), S((4, 512, 512), jnp.bfloat16), S((4,), jnp.int32))
    return plain(lambda x, w, g: gmm(x, w, g, preferred_element_type=jnp.bfloat16), *specs, name="gmm")


def large_constant():
    """A module larger than a pipe holds."""
    constant = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    return plain(lambda x: x + constant, S((512, 512), jnp.float32), name="large")


def hungry(limit=None):
    """32 MiB of windows; a v5e gives 16 unless asked."""
    parameters = pltpu.CompilerParams(vmem_limit_bytes=limit)
    return plain(lambda x: copy(x, 1024, compiler_params=parameters), S((4096, 2048), jnp.float32), name=f"hungry {limit}")


def all_jobs():
    """By label, in one pool, since a worker takes seconds to start."""
    v5e, v6e = TARGETS["v5e"], TARGETS["v6e"]
    return {
        **{f"product {t}": Job(bound=product.bind(A, B), target=target, workload="small") for t, target in TARGETS.items()},
        **{f"overflow {t}": Job(bound=overflowing(), target=target) for t, target in TARGETS.items()},
        "column": Job(bound=column(), target=v5e),
        "raising": Job(bound=raising(), target=v5e, direction="backward"),
        "one copy": Job(bound=plain(lambda x: copy(x, 512), MATRIX, name="copy"), target=v5e),
        "two copies": Job(bound=plain(lambda x: copy(copy(x, 512), 8), TALL, name="copies"), target=v6e),
        "no kernel": Job(bound=plain(lambda x: x + 1, MATRIX, name="none"), target=v5e),
        "large": Job(bound=large_constant(), target=v5e),
        "gmm": Job(bound=tables_in_megablox(), target=v6e),
        "hungry": Job(bound=hungry(), target=v5e),
        "hungry with a limit": Job(bound=hungry(48 * MIB), target=v5e),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Every job compiled cold: the jobs, their results, and the results in the order in which they came."""
    jobs, came, cache = all_jobs(), [], tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TPUKERN_CACHE_DIR", str(cache))
        results = compiling.compile_many(list(jobs.values()), on_result=came.append)
    return types.SimpleNamespace(jobs=jobs, results=dict(zip(jobs, results, strict=True)), came=came, cache=cache)


def test_every_target_compiles_with_its_figures(run):
    windows = 2 * 3 * 128 * 128 * 2
    for name in TARGETS:
        result = run.results[f"product {name}"]
        assert result.ok, result.error
        assert (result.kernel, result.direction, result.workload, result.dtype) == ("product", "forward", "small", "bfloat16")
        assert (result.target, result.shapes) == (name, ((256, 512), (512, 256)))
        assert result.config == str(product.bind(A, B).config)
        assert (result.cached, result.error) == (False, None)
        assert 0 < result.seconds < 600
        assert windows // 2 <= result.vmem_bytes <= windows + 128 * 128 * 4 + 256 * 1024
        assert 10_000 < result.code_bytes < 10_000_000
        assert result.digest == lowering.lower(product.bind(A, B), name).digest
    assert len({run.results[f"product {name}"].code_bytes for name in TARGETS}) > 1  # not one chip's code five times


def test_results_come_one_by_one_and_are_returned_in_order(run):
    jobs = list(run.jobs.values())
    assert [(r.kernel, r.target) for r in run.results.values()] == [(j.bound.kernel.name, j.target.name) for j in jobs]
    assert len(run.came) == len(jobs)
    assert all(any(came is result for came in run.came) for result in run.results.values())


def test_vmem_is_what_the_compiler_allocated(run):
    four_windows = 2 * 2 * 512 * 1024 * 4  # in and out, two buffers each, and nothing else to keep
    assert run.results["one copy"].vmem_bytes == four_windows
    assert run.results["two copies"].vmem_bytes == four_windows  # the larger kernel's
    assert (run.results["no kernel"].ok, run.results["no kernel"].vmem_bytes) == (True, 0)


def test_a_module_larger_than_a_pipe(run):
    assert len(lowering.lower(large_constant(), "v5e").module) > 1 << 20
    assert run.results["large"].ok, run.results["large"].error


def test_a_program_whose_hlo_jaxlib_cannot_parse_back(run):
    assert run.results["gmm"].ok, run.results["gmm"].error
    assert run.results["gmm"].vmem_bytes == 262_144


def test_lowered_bound_and_json():
    bound = product.bind(A, B, block_m=256)
    from_bound = compiling.compile(bound, "v5e")
    from_lowered = compiling.compile(lowering.lower(bound, "v5e"), use_cache=False)
    from_target = compiling.compile(product.bind(A, B, block_m=256, target=TARGETS["v5e"]))
    assert [r.cached for r in (from_bound, from_lowered, from_target)] == [False, False, True]
    assert from_target == dataclasses.replace(from_lowered, seconds=from_target.seconds, cached=True)
    assert json.loads(json.dumps(from_bound.as_json())) == from_bound.as_json()
    assert from_bound.as_json()["shapes"] == [[256, 512], [512, 256]]
    with pytest.raises(ConfigError, match="no target"):
        compiling.compile(bound)


def test_a_warm_compile_starts_no_worker_and_lowers_nothing(run, monkeypatch):
    monkeypatch.setenv("TPUKERN_CACHE_DIR", str(run.cache))
    no_workers(monkeypatch)
    monkeypatch.setattr(lowering, "lower", lambda *_: pytest.fail("something was lowered"))
    known = {name: job for name, job in all_jobs().items() if name != "raising"}
    warm = compiling.compile_many(list(known.values()))
    assert warm == [dataclasses.replace(run.results[name], cached=True) for name in known]


def test_jobs_that_mean_the_same_are_compiled_once(monkeypatch):
    sent = []
    submit = worker_pool.WorkerPool.submit

    def counted(pool, task):
        sent.append(task.tag)
        submit(pool, task)

    monkeypatch.setattr(worker_pool.WorkerPool, "submit", counted)
    bound = product.bind(A, B)
    jobs = [Job(bound=bound, target=TARGETS["v5e"], workload=name) for name in "abc"]
    seen = []
    results = compiling.compile_many(jobs, on_result=seen.append)
    assert sent == [0]
    assert [r.workload for r in results] == ["a", "b", "c"] == [r.workload for r in seen]
    assert {r.code_bytes for r in results} == {results[0].code_bytes}


def test_vmem_limits(run):
    allowed = compiling.compile(hungry(), "v5e", options={"xla_tpu_scoped_vmem_limit_kib": 65536})
    assert not run.results["hungry"].ok
    assert (allowed.ok, allowed.cached, allowed.vmem_bytes) == (True, False, 32 * MIB)
    assert run.results["hungry with a limit"].vmem_bytes == 32 * MIB


OVERFLOWS = {
    "v4": (64.0, "64.00 MiB of VMEM needed; expected at most 16.00 MiB. Choose smaller blocks."),
    "v5e": (
        128.0,
        "128.00 MiB of scoped VMEM needed; expected at most 16.00 MiB. Choose smaller blocks, or raise vmem_limit_bytes.",
    ),
    "v5p": (128.0, "128.00 MiB of VMEM needed; expected at most 63.94 MiB. Choose smaller blocks."),
    "v6e": (128.0, "128.00 MiB of VMEM needed; expected at most 127.94 MiB. Choose smaller blocks."),
    "v7x": (128.0, "128.00 MiB of VMEM needed; expected at most 63.94 MiB. Choose smaller blocks."),
}


def test_an_overflow_of_vmem_is_a_result_with_its_sizes(run):
    for name, (mebibytes, text) in OVERFLOWS.items():
        result = run.results[f"overflow {name}"]
        assert not result.ok
        assert result.error == f"big[compile] on {name}: {text}"
        assert (result.vmem_bytes, result.code_bytes) == (int(mebibytes * MIB), None)
        assert result.digest is not None


def test_what_mosaic_refuses_is_a_result_with_the_kernels_line(run):
    assert re.fullmatch(
        r"column\[compile\] on v5e: INTERNAL: Mosaic failed to compile TPU kernel .* infer-vector-layout:"
        r' unsupported shape cast The MLIR operation involved: .*"vector\.shape_cast".*vector<256x1xbf16>, at'
        r" .*test_compile\.py:\d+; expected a kernel that the TPU compiler accepts\.",
        run.results["column"].error,
    )


def test_what_cannot_be_lowered_is_a_result(run):
    result = run.results["raising"]
    assert re.fullmatch(
        r"raising\[lower\] on v5e: ValueError: boom, at .*test_compile\.py:\d+; expected a body that Pallas can lower\.",
        result.error,
    )
    assert (result.ok, result.digest, result.cached, result.direction) == (False, None, False, "backward")


def test_a_result_that_depends_on_a_nameless_static_is_not_kept(own_cache):
    class Nameless:
        pass

    bound = plain(lambda x: x, S((8, 128), jnp.float32))
    bound.config = {"what": Nameless()}
    assert compiling.compile(bound, "v5e").ok
    assert not own_cache.exists()
    bound.config = {}
    assert not compiling.compile(bound, "v5e").cached
    assert compiling.compile(bound, "v5e").cached


def test_nothing_to_compile(monkeypatch):
    no_workers(monkeypatch)
    assert compiling.compile_many([]) == []


@pytest.mark.parametrize(
    ("text", "bytes_", "error"),
    [
        (
            "E1001: CompileTimeScopedVmemOom: ... Scoped allocation with size 18.07M and limit 16.00M exceeded scoped ...",
            int(18.07 * MIB),
            "k[compile] on v9: 18.07 MiB of scoped VMEM needed; expected at most 16.00 MiB."
            " Choose smaller blocks, or raise vmem_limit_bytes.",
        ),
        (
            "Ran out of memory in memory space vmem. Used 1.50G of 63.94M vmem. Exceeded",
            3 * 512 * MIB,
            "k[compile] on v9: 1536.00 MiB of VMEM needed; expected at most 63.94 MiB. Choose smaller blocks.",
        ),
        (
            "Allocation (size=67108864) would exceed memory (size=16777216) :: #a [space=smem]",
            None,
            "k[compile] on v9: Allocation (size=67108864) would exceed memory (size=16777216) :: #a [space=smem];"
            " expected a kernel that the TPU compiler accepts.",
        ),
        (
            "INTERNAL: nothing\n\n known.",
            None,
            "k[compile] on v9: INTERNAL: nothing known; expected a kernel that the TPU compiler accepts.",
        ),
    ],
)
def test_refusals_in_our_form(text, bytes_, error):
    needed, said = compiling.refusal("k", "v9", text)
    assert (needed, str(said)) == (bytes_, error)


def test_blocks_that_no_vmem_holds_are_refused_before_libtpu_sees_them(monkeypatch):
    def never(*args, **keywords):
        raise AssertionError("a worker was asked")

    monkeypatch.setattr(worker_pool.WorkerPool, "submit", never)
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((8192,), jnp.bfloat16)
    result = compiling.compile(rms_norm.bind(x, w, eps=1e-5, config={"block_r": 4096}, target="v5e"))
    assert (result.ok, result.vmem_bytes) == (False, 2 * (64 << 20) + (16 << 10) + (16 << 10))  # x and y, w, rstd
    said = "128.03 MiB of VMEM needed; expected at most 128.00 MiB. Choose smaller blocks."
    assert result.error == f"rms_norm[compile] on v5e: {said}"
