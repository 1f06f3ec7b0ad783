"""The IR says what the jaxpr says, for any JAX callable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern.dsl import ir
from tpukern.targets import TARGETS

S = jax.ShapeDtypeStruct


def copy_kernel(x_ref, y_ref):
    y_ref[...] = x_ref[...]


def copy(x, rows=8, **keywords):
    """Copies a matrix, ``rows`` at a time."""
    columns = x.shape[1]
    spec = pl.BlockSpec((rows, columns), lambda i: (i, 0))
    return pl.pallas_call(
        copy_kernel, grid=(x.shape[0] // rows,), in_specs=[spec], out_specs=spec, out_shape=S(x.shape, x.dtype), **keywords
    )(x)


def matmul(x, w):
    def body(x_ref, w_ref, y_ref, acc_ref, *_):
        acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
        y_ref[...] = acc_ref[...].astype(y_ref.dtype)

    m, k = x.shape
    n = w.shape[1]
    return pl.pallas_call(
        body,
        name="matmul",
        grid=(m // 128, n // 256, k // 512),
        in_specs=[
            pl.BlockSpec((128, 512), lambda i, j, k: (i, k)),
            pl.BlockSpec((512, 256), lambda i, j, k: (k, j), pipeline_mode=pl.Buffered(3)),
        ],
        out_specs=pl.BlockSpec((128, 256), lambda i, j, k: (i, j)),
        out_shape=S((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((128, 256), jnp.float32), pltpu.SMEM((4,), jnp.int32), pltpu.SemaphoreType.DMA((2,))],
        cost_estimate=pl.CostEstimate(flops=7, transcendentals=8, bytes_accessed=9),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=1 << 25, disable_bounds_checks=True
        ),
    )(x, w)


def gather(table, x):
    """Row blocks of x in the order that the table says, masked to the first two thirds by the index map."""

    def body(table_ref, x_ref, y_ref):
        y_ref[...] = x_ref[...]

    def index(i, j, table_ref):
        return (jnp.where(j > i, table_ref[i] // 2, jnp.minimum(table_ref[i], 3)), 0)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4, 2),
            in_specs=[pl.BlockSpec((None, 8, 128), lambda i, j, t: (*index(i, j, t), j))],
            out_specs=pl.BlockSpec((8, 128), lambda i, j, t: (i, j)),
        ),
        out_shape=S((32, 256), x.dtype),
    )(table, x)


def test_every_field_of_a_call():
    (call,) = ir.calls_of(matmul, S((256, 1024), jnp.bfloat16), S((1024, 512), jnp.bfloat16))
    assert (call.name, call.grid, call.steps) == ("matmul", (2, 2, 2), 8)
    assert call.dimension_semantics == ("parallel", "parallel", "arbitrary")
    assert call.vmem_limit_bytes == 1 << 25
    assert call.flags == {"disable_bounds_checks": True}
    assert call.cost == {"flops": 7, "transcendentals": 8, "bytes_accessed": 9}
    assert [(u.shape, u.dtype, u.block, u.memory_space, u.buffers) for u in call.blocks] == [
        ((256, 1024), "bfloat16", (128, 512), "vmem", 2),
        ((1024, 512), "bfloat16", (512, 256), "vmem", 3),
        ((256, 512), "bfloat16", (128, 256), "vmem", 2),
    ]
    assert [(b.shape, b.dtype, b.memory_space) for b in call.scratch] == [
        ((128, 256), "float32", "vmem"),
        ((4,), "int32", "smem"),
        ((2,), "dma_sem", "semaphore_mem"),
    ]
    assert (call.repeats, call.conditional, call.interpret, call.prefetch, call.aliases) == (1, False, False, (), ())


def test_the_vmem_estimate_adds_buffers_scratch_and_live_values():
    (call,) = ir.calls_of(matmul, S((256, 1024), jnp.bfloat16), S((1024, 512), jnp.bfloat16))
    windows = 2 * 128 * 512 * 2 + 3 * 512 * 256 * 2 + 2 * 128 * 256 * 2
    product_and_sum = 2 * 128 * 256 * 4
    assert call.temporaries_bytes == product_and_sum
    assert call.vmem_estimate_bytes == windows + 128 * 256 * 4 + product_and_sum


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8, 128), "float32", 4096),
        ((9, 129), "float32", 16 * 256 * 4),
        ((1, 128), "bfloat16", 16 * 128 * 2),
        ((3, 32, 128), "int8", 3 * 32 * 128),
        ((5,), "float32", 4096),
        ((64, 128), "int4", 64 * 128 // 2),
    ],
)
def test_padding_to_tiles(shape, dtype, expected):
    assert ir.padded_bytes(shape, dtype) == expected


def test_index_maps_can_be_evaluated_and_read():
    x, w, y = ir.calls_of(matmul, S((256, 1024), jnp.bfloat16), S((1024, 512), jnp.bfloat16))[0].blocks
    assert w.index_map(5, 6, 7) == (7, 6)
    assert (w.index_map.text(), w.index_map.text("mnk")) == ("(k, j)", "(k, n)")
    assert (x.index_map.depends_on, w.index_map.depends_on, y.index_map.depends_on) == ((0, 2), (1, 2), (0, 1))
    steps = x.index_map.over((2, 2, 3))
    assert steps.dtype == np.int32
    assert steps.tolist() == [[i, k] for i in range(2) for _ in range(2) for k in range(3)]


def test_index_maps_that_read_tables():
    (call,) = ir.calls_of(gather, S((4,), jnp.int32), S((9, 8, 256), jnp.float32))
    source = call.inputs[0]
    assert [(b.shape, b.dtype, b.memory_space) for b in call.prefetch] == [((4,), "int32", "smem")]
    assert (source.block, source.ref_shape, source.block_bytes) == ((None, 8, 128), (8, 128), 4096)
    assert source.index_map.reads_tables
    assert not call.outputs[0].index_map.reads_tables
    assert source.index_map.text(["i", "j"], ["page"]) == "(page[i] // 2 if j > i else min(page[i], 3), 0, j)"
    table = [8, 5, 1, 2]
    assert source.index_map(0, 1, tables=[table]) == (4, 0, 1)
    wanted = [[table[i] // 2 if j > i else min(table[i], 3), 0, j] for i in range(4) for j in range(2)]
    assert source.index_map.over((4, 2), [table]).tolist() == wanted
    with pytest.raises(ValueError, match="0 scalar-prefetch arrays given; the index map takes 1"):
        source.index_map(0, 1)
    assert call.outputs[0].index_map(3, 1) == (3, 1)


def test_a_call_without_a_grid_or_specs():
    def whole(x):
        return pl.pallas_call(copy_kernel, out_shape=S(x.shape, x.dtype), input_output_aliases={0: 0})(x)

    (call,) = ir.calls_of(whole, S((8, 128), jnp.float32))
    assert (call.grid, call.steps, call.aliases) == ((), 1, ((0, 0),))
    assert call.name == "copy_kernel"
    assert call.inputs[0].block == (8, 128)
    assert call.inputs[0].index_map() == (0, 0)
    assert call.inputs[0].index_map.over(()).tolist() == [[0, 0]]


def test_arrays_left_in_hbm_take_no_vmem():
    def body(x_ref, y_ref):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 8)], y_ref)

    def first_rows(x):
        spec = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(body, in_specs=[spec], out_shape=S((8, 128), x.dtype))(x)

    (call,) = ir.calls_of(first_rows, S((4096, 128), jnp.float32))
    assert (call.inputs[0].memory_space, call.inputs[0].buffers, call.inputs[0].vmem_bytes) == ("any", 1, 0)
    assert call.outputs[0].vmem_bytes == 2 * 4096


def test_element_indexed_axes():
    def windows(x):
        spec = pl.BlockSpec((pl.Element(16), pl.Element(128)), lambda i: (i * 8, 0))
        out = pl.BlockSpec((16, 128), lambda i: (i, 0))
        return pl.pallas_call(copy_kernel, grid=(3,), in_specs=[spec], out_specs=out, out_shape=S((48, 128), x.dtype))(x)

    (call,) = ir.calls_of(windows, S((32, 128), jnp.float32))
    assert (call.inputs[0].element_axes, call.outputs[0].element_axes) == ((0, 1), ())
    assert call.inputs[0].index_map(2) == (16, 0)


def test_a_grid_that_only_the_device_knows():
    def dynamic(n, x):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(copy_kernel, grid=(n,), in_specs=[spec], out_specs=spec, out_shape=S(x.shape, x.dtype))(x)

    (call,) = ir.calls_of(dynamic, S((), jnp.int32), S((64, 128), jnp.float32))
    assert (call.grid, call.steps) == ((None,), None)
    assert call.text().startswith("copy_kernel: grid (i=? arbitrary)")


def nested(x):
    @jax.custom_vjp
    def with_gradient(x):
        return copy(x, 8, name="in_custom_vjp")

    with_gradient.defvjp(lambda x: (with_gradient(x), None), lambda _, g: (copy(g, 16, name="in_backward"),))

    x = jax.jit(lambda x: copy(x, 32, name="in_jit"))(x)
    x = with_gradient(x)
    x = jax.lax.fori_loop(0, 5, lambda _, x: jax.lax.fori_loop(0, 3, lambda _, x: copy(x, name="in_scan"), x), x)
    x = jax.lax.cond(x[0, 0] > 0, lambda x: copy(x, name="in_true"), lambda x: copy(x, name="in_false"), x)
    x = jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: copy(x, name="in_while"), x)
    return jax.checkpoint(lambda x: copy(x, name="in_remat"))(x)


def test_calls_are_found_however_deep_in_program_order():
    calls = ir.calls_of(nested, S((64, 128), jnp.float32))
    assert [(c.name, c.repeats, c.conditional) for c in calls] == [
        ("in_jit", 1, False),
        ("in_custom_vjp", 1, False),
        ("in_scan", 15, False),
        ("in_false", 1, True),
        ("in_true", 1, True),
        ("in_while", None, False),
        ("in_remat", 1, False),
    ]


def test_calls_of_a_gradient_are_found():
    def loss(x):
        @jax.custom_vjp
        def f(x):
            return copy(x, name="forward")

        f.defvjp(lambda x: (f(x), None), lambda _, g: (copy(g, 16, name="backward"),))
        return jnp.sum(f(x))

    assert [c.name for c in ir.calls_of(jax.grad(loss), S((64, 128), jnp.float32))] == ["forward", "backward"]


def test_vmapped_calls_keep_their_extra_grid_dimension():
    (call,) = ir.calls_of(jax.vmap(copy), S((5, 64, 128), jnp.float32))
    assert call.grid == (5, 8)
    assert call.inputs[0].index_map(3, 2) == (3, 2, 0)


def test_kernels_that_ask_for_the_chip_are_traced_for_it():
    def asking(x):
        return copy(x, 8 * pltpu.get_tpu_info().num_mxus)

    def rows(target):
        return ir.calls_of(asking, S((64, 128), jnp.float32), target=TARGETS[target])[0].inputs[0].block[0]

    assert (rows("v5e"), rows("v6e")) == (32, 16)


def test_a_callable_without_pallas_has_no_calls():
    assert ir.calls_of(lambda x: x + 1, S((8,), jnp.float32)) == ()


def test_the_text_names_everything():
    (call,) = ir.calls_of(matmul, S((256, 1024), jnp.bfloat16), S((1024, 512), jnp.bfloat16))
    assert call.text() == "\n".join(
        [
            "matmul: grid (i=2 parallel, j=2 parallel, k=2 arbitrary)",
            "  in args[0]: bfloat16[256, 1024] block (128, 512) at (i, k) in 2 x vmem",
            "  in args[1]: bfloat16[1024, 512] block (512, 256) at (k, j) in 3 x vmem",
            "  out outputs: bfloat16[256, 512] block (128, 256) at (i, j) in 2 x vmem",
            "  scratch: float32[128, 256] in vmem",
            "  scratch: int32[4] in smem",
            "  scratch: dma_sem[2] in semaphore_mem",
            "  vmem limit: 33,554,432 bytes",
            "  disable_bounds_checks: True",
            f"  vmem estimate: {call.vmem_estimate_bytes:,} bytes",
        ]
    )
    (call,) = ir.calls_of(gather, S((4,), jnp.int32), S((9, 8, 256), jnp.float32))
    assert "  prefetch t0: int32[4] in smem" in call.text()

    def thrice(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: copy(x, input_output_aliases={0: 0}), x)

    (call,) = ir.calls_of(thrice, S((64, 128), jnp.float32))
    assert call.text().splitlines()[0] == "copy_kernel: grid (i=8 arbitrary), run 3 times"
    assert "  alias: output 0 is operand 0" in call.text()
