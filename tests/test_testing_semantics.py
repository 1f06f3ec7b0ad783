"""Kernels under the TPU interpreter: what it has to find, and what it must not."""

import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern.testing.semantics import Simulated, simulate

F32 = jnp.float32
X = np.arange(4 * 8 * 128, dtype=np.float32).reshape(32, 128)
HBM = pl.BlockSpec(memory_space=pl.ANY)
ROWS = pl.BlockSpec((8, 128), lambda i: (i, 0))


def call(body, *, grid=(4,), in_specs=(ROWS,), out_specs=ROWS, out=(32, 128), scratch=(), semantics=("arbitrary",), **more):
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=list(in_specs),
        out_specs=out_specs,
        out_shape=jax.ShapeDtypeStruct(out, F32),
        scratch_shapes=list(scratch),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        **more,
    )


def copy_body(wait_before, wait_after):
    """Copies a block by a DMA of its own."""

    def copies(x, y, window, sem):
        i = pl.program_id(0)
        copy = pltpu.make_async_copy(x.at[pl.ds(i * 8, 8)], window, sem)
        copy.start()
        if wait_before:
            copy.wait()
        y[...] = window[...] * 2
        if wait_after:
            copy.wait()

    return copies


SCRATCH = (pltpu.VMEM((8, 128), F32), pltpu.SemaphoreType.DMA)


def no_thread_left():
    return not [t for t in threading.enumerate() if t.name == "tpukern-semantics"]


def test_a_clean_kernel():
    def doubles(x, y, acc):
        acc[...] = x[...]
        y[...] = acc[...] * 2

    report = simulate(call(doubles, scratch=SCRATCH[:1], semantics=("parallel",)), X)
    assert report.ok, report.findings
    assert np.array_equal(report.outputs, X * 2)
    assert report.steps == 8  # twice: the parallel steps in two orders


def test_a_clean_kernel_with_its_own_dma():
    report = simulate(call(copy_body(True, False), in_specs=(HBM,), scratch=SCRATCH), X)
    assert report.ok, report.findings
    assert np.array_equal(report.outputs, X * 2)


def test_a_missing_dma_wait():
    report = simulate(call(copy_body(False, True), in_specs=(HBM,), scratch=SCRATCH), X)
    kinds = {f.kind for f in report.findings}
    assert kinds == {"race"}
    finding = report.findings[0]
    assert finding.kernel == "copies"
    assert finding.what.startswith("a read of window is not ordered with a write of it at")
    assert "test_testing_semantics.py" in finding.source
    assert finding.grid_step == (0,)
    assert str(finding).startswith("race in copies in grid step (0,): a read of window is not ordered with")


def test_a_wait_that_is_missing_altogether():
    report = simulate(call(copy_body(False, False), in_specs=(HBM,), scratch=SCRATCH), X)
    assert {"race", "semaphore"} <= {f.kind for f in report.findings}
    texts = [f.what for f in report.findings if f.kind == "semaphore"]
    assert texts == ["semaphore sem is 16384 at the end of the kernel; expected 0"]


def test_a_dma_that_is_never_waited_for_is_found_without_the_race_detector():
    report = simulate(call(copy_body(False, True), in_specs=(HBM,), scratch=SCRATCH), X, races=False)
    (finding,) = report.findings
    assert finding.kind == "race"
    assert "depends on when DMAs land" in finding.what


def test_an_unsignalled_semaphore():
    def waits(x, y, sem):
        y[...] = x[...]

        @pl.when(pl.program_id(0) == 2)
        def _():
            pl.semaphore_wait(sem, 1)

    report = simulate(call(waits, scratch=(pltpu.SemaphoreType.REGULAR,)), X, timeout=300)
    (finding,) = report.findings
    assert (finding.kind, finding.kernel, finding.grid_step) == ("hang", "waits", (2,))
    assert finding.what.startswith(
        "every core waits for what nothing is left to give; device 0 core 0 in grid step (2,) waits at "
    )
    assert finding.what.endswith("for semaphore sem to reach 1; it is 0")
    assert "test_testing_semantics.py" in finding.what
    assert report.outputs is None
    assert no_thread_left()


def test_a_dma_that_was_never_started():
    def body(x, y, window, sem):
        pltpu.make_async_copy(x.at[pl.ds(0, 8)], window, sem).wait()
        y[...] = window[...]

    report = simulate(call(body, in_specs=(HBM,), scratch=SCRATCH), X, timeout=300)
    (finding,) = report.findings
    assert (finding.kind, finding.grid_step) == ("hang", (0,))
    assert "waits at" in finding.what
    assert finding.what.endswith("for semaphore sem to reach 4096; it is 0")


def endless_with_refs(x, y):
    def more(c):
        y[...] = x[...]
        return c

    y[...] = x[...]

    @pl.when(pl.program_id(0) == 3)
    def _():
        lax.while_loop(lambda c: c < 1, more, 0)


def endless_without_refs(x, y):
    y[...] = x[...] + lax.while_loop(lambda c: c < 1.0, lambda c: c * 0.5, x[0, 0] * 0)


@pytest.mark.parametrize(("body", "step"), [(endless_with_refs, (3,)), (endless_without_refs, (0,))])
def test_a_loop_without_end_is_ended(body, step):
    report = simulate(call(body), X, timeout=3)
    (finding,) = report.findings
    assert (finding.kind, finding.kernel, finding.grid_step) == ("hang", body.__name__, step)
    assert finding.what == "still running after 3 s"
    assert no_thread_left()


def test_after_a_hang_everything_works_again():
    def waits(x, y, sem):
        pl.semaphore_wait(sem, 1)
        y[...] = x[...]

    for _ in range(2):
        assert simulate(call(waits, scratch=(pltpu.SemaphoreType.REGULAR,)), X).findings[0].kind == "hang"
        assert simulate(call(copy_body(True, False), in_specs=(HBM,), scratch=SCRATCH), X).ok


def test_an_uninitialised_read():
    def sums(x, y, acc):
        acc[...] += x[...]
        y[...] = acc[...]

    report = simulate(call(sums, scratch=SCRATCH[:1]), X)
    (finding,) = report.findings
    assert (finding.kind, finding.kernel, finding.grid_step) == ("uninitialised", "sums", (0,))
    assert finding.what == (
        "output 0, 4096 of 4096 elements from (0, 0) on, depends on what uninitialised memory holds; acc is read before it "
        "is written"
    )
    assert "test_testing_semantics.py" in finding.source


def test_an_output_that_is_not_written():
    def half(x, y):
        y[:4] = x[:4]

    report = simulate(call(half), X)
    (finding,) = report.findings
    assert finding.kind == "uninitialised"
    assert finding.what == "output 0, 2048 of 4096 elements from (4, 0) on, depends on what uninitialised memory holds"


def test_uninitialised_memory_that_is_masked_away_is_no_fault():
    def masks(x, y, acc):
        y[...] = jnp.where(pl.program_id(0) < 4, x[...], acc[...])

    assert simulate(call(masks, scratch=SCRATCH[:1]), X).ok


def test_ragged_edges_are_uninitialised():
    def sums(masked):
        def body(x, y):
            i = pl.program_id(0)

            @pl.when(i == 0)
            def _():
                y[...] = jnp.zeros_like(y)

            rows = lax.broadcasted_iota(jnp.int32, x.shape, 0) + i * 8
            y[...] += jnp.sum(jnp.where(rows < 29, x[...], 0) if masked else x[...], axis=0, keepdims=True)

        return call(body, out_specs=pl.BlockSpec((1, 128), lambda i: (0, 0)), out=(1, 128))

    report = simulate(sums(True), X[:29])
    assert report.ok, report.findings
    assert np.allclose(report.outputs, X[:29].sum(0))
    (finding,) = simulate(sums(False), X[:29]).findings
    assert (finding.kind, finding.grid_step) == ("uninitialised", (3,))


def test_nan_and_largest_integers_in_the_input_are_no_fault():
    def body(x, n, y):
        y[...] = x[...] + n[0, 0].astype(F32)

    x, n = X.copy(), np.full((1, 1), np.iinfo(np.int32).max, np.int32)
    x[3] = np.nan
    smem = pl.BlockSpec((1, 1), lambda i: (0, 0), memory_space=pltpu.SMEM)
    assert simulate(call(body, in_specs=(ROWS, smem)), x, n).ok


def test_an_out_of_bounds_read():
    def reads(x, y):
        y[...] = x[pl.ds(pl.program_id(0) * 2, 8)]

    report = simulate(call(reads, in_specs=(pl.BlockSpec((8, 128), lambda i: (0, 0)),)), X)
    (finding,) = report.findings
    assert (finding.kind, finding.kernel, finding.grid_step) == ("out_of_bounds", "reads", (1,))
    assert finding.what.startswith("Out-of-bounds read of x: reading")
    assert no_thread_left()


def test_an_index_map_that_leaves_the_array():
    def body(x, y):
        y[...] = x[...]

    report = simulate(call(body, in_specs=(pl.BlockSpec((8, 128), lambda i: (i + 1, 0)),)), X)
    (finding,) = report.findings
    assert (finding.kind, finding.grid_step) == ("out_of_bounds", (3,))


def test_a_sum_over_a_dim_that_is_called_parallel():
    def body(x, y, acc):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += x[...]
        y[...] = acc[...]

    one = pl.BlockSpec((8, 128), lambda i: (0, 0))
    wrong = call(body, out_specs=one, out=(8, 128), scratch=SCRATCH[:1], semantics=("parallel",))
    right = call(body, out_specs=one, out=(8, 128), scratch=SCRATCH[:1])
    assert "order" in {f.kind for f in simulate(wrong, X).findings}
    assert simulate(right, X).ok


def test_a_block_that_is_revisited():
    def body(x, y):
        y[...] = x[...]

    report = simulate(call(body, out_specs=pl.BlockSpec((8, 128), lambda i: (i % 2, 0)), out=(16, 128)), X)
    (finding,) = report.findings
    assert (finding.kind, finding.grid_step) == ("order", (2,))
    assert finding.what.startswith("Revisited block")


def test_parallel_dims_behind_an_arbitrary_one_are_accepted():
    def body(x, y):
        y[...] = x[...]

    spec = pl.BlockSpec((8, 64), lambda i, j: (i, j))
    twice = call(body, grid=(4, 2), in_specs=(spec,), out_specs=spec, semantics=("arbitrary", "parallel"))
    assert simulate(twice, X).ok


def test_one_program_several_kernels_and_inputs():
    def doubles(x, y):
        y[...] = x[...] * 2

    def body(x, y, acc):
        y[...] = acc[...]

    good, bad = call(doubles), call(body, scratch=SCRATCH[:1])
    prepared = Simulated(lambda x: {"a": good(good(x)), "b": x}, jax.ShapeDtypeStruct(X.shape, F32))
    for scale in (1, 2):
        report = prepared.run(X * scale)
        assert report.ok
        assert report.steps == 8
        assert np.array_equal(report.outputs["a"], X * scale * 4)
    (finding,) = simulate(jax.jit(lambda x: bad(good(x))), X).findings
    assert (finding.kind, finding.kernel) == ("uninitialised", "body")


def test_two_cores_share_the_parallel_steps():
    def doubles(x, y):
        y[...] = x[...] * 2

    report = simulate(call(doubles, semantics=("parallel",)), X, cores=2)
    assert report.ok, report.findings
    assert np.array_equal(report.outputs, X * 2)


COLLECTIVE = textwrap.dedent(
    """
    import sys
    import numpy as np
    from tpukern.testing.semantics import simulate, simulated_devices

    devices = simulated_devices(4)
    import jax, jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(np.array(devices), ("x",))

    def shifts(fault):
        def body(x, y, send, receive):
            me = jax.lax.axis_index("x")
            right = (me + 1) % 4
            copy = pltpu.make_async_remote_copy(
                x, y, send, receive, device_id=(right,), device_id_type=pltpu.DeviceIdType.MESH
            )
            if fault == "hang":
                @pl.when(me != 1)
                def _():
                    copy.start()
            else:
                copy.start()
            if fault == "race":
                x[...] = jnp.zeros_like(x)
            copy.wait_send()
            copy.wait_recv()

        def run(x):
            return pl.pallas_call(
                body,
                in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
                out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
                out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
                name="shifts",
            )(x)

        return jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False)

    x = np.arange(4 * 8 * 128, dtype=np.float32).reshape(32, 128)
    for fault in (None, "hang", "race", None):
        report = simulate(shifts(fault), x, timeout=120)
        if fault is None:
            assert report.ok, report.findings
            assert np.array_equal(report.outputs, np.roll(x, 8, axis=0))
        elif fault == "hang":
            (finding,) = report.findings
            assert finding.kind == "hang" and finding.kernel == "shifts", finding
            assert "device 1 core 0" in finding.what and "semaphore send" in finding.what, finding
            assert "device 2 core 0" in finding.what and "semaphore receive" in finding.what, finding
        else:
            assert {f.kind for f in report.findings} == {"race"}, report.findings
    print("done")
    """
)


def test_collective_kernels_on_four_simulated_devices(tmp_path):
    script = tmp_path / "collective.py"
    script.write_text(COLLECTIVE)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500)
    assert done.stdout.strip().endswith("done"), done.stdout + done.stderr
