"""JAX functions with kernels of their own, adopted: every road that a kernel has, and what cannot be adopted."""

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import tpukern
from tpukern import TARGETS, Choice, Kernel, Workload
from tpukern.compiling import Job, compile_many
from tpukern.dsl import using
from tpukern.errors import ConfigError, SignatureError
from tpukern.testing import parity

pytestmark = pytest.mark.filterwarnings("ignore:<TorchTpu/")


def scale(x: jax.Array, w: jax.Array, *, by: float = 2.0, rows: int = 8, interpret: bool = True) -> jax.Array:
    """y = by * x * w, a row of blocks at a time; it asks the chip for its generation."""
    assert pltpu.get_tpu_info().generation >= 5

    def body(x: Any, w: Any, y: Any) -> None:
        y[...] = (x[...].astype(jnp.float32) * w[...].astype(jnp.float32) * by).astype(y.dtype)

    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(x.shape[0], rows),),
        in_specs=[block, pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=interpret,
    )(x, w[None])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def differentiable(x: jax.Array, w: jax.Array, by: float = 2.0) -> jax.Array:
    return scale(x, w, by=by)


differentiable.defvjp(
    lambda x, w, by: (scale(x, w, by=by), (x, w)),
    lambda by, kept, dy: (scale(dy, kept[1], by=by), (by * kept[0] * dy).sum(0).astype(kept[1].dtype)),
)
SIGNATURE = "x: *r d, w: d -> y: *r d"


def reference(x: torch.Tensor, w: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * w * by


def adopted(function: Any = scale, **keywords: Any) -> Kernel:
    return tpukern.adopt(function, **{"signature": SIGNATURE, "reference": reference, **keywords})


@pytest.fixture(scope="module")
def scaled() -> Kernel:
    return adopted(
        differentiable,
        name="adopted_scale",
        op="adopted::scale",
        sizes={"d": 128},
        workloads=[Workload("small", r=32, d=128)],
    )


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    folder = str(Path(__file__).parent.parent / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import peer_kernels
    finally:
        sys.path.remove(folder)
    return peer_kernels


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_choices_statics_and_leading_axes() -> None:
    kernel = adopted(choices={"rows": Choice(8, 16)}, statics=("by",))
    assert kernel.frontend == "jax"
    assert dict(kernel.declaration.statics) == {"by": 2.0}
    assert kernel.doc.startswith("y = by * x * w")
    x, w = normal(2, 20, 128), normal(128)
    np.testing.assert_allclose(kernel(x, w, by=3.0, rows=16), 3 * x * w, rtol=1e-6)
    assert [str(config) for config in kernel.configs(kernel.signature(x, w))] == ["rows=8", "rows=16"]
    assert kernel.bind(x, w, rows=16).calls[0].grid == (3,)
    assert [call.interpret for call in kernel.bind(x, w).calls] == [False]


def test_derivative_of_its_own(scaled: Kernel) -> None:
    x, w = normal(8, 128), normal(128)
    dx, dw = jax.grad(lambda x, w: (scaled(x, w, by=3.0) ** 2).sum(), argnums=(0, 1))(x, w)
    np.testing.assert_allclose(dx, 2 * 9 * x * w**2, rtol=1e-5)
    np.testing.assert_allclose(dw, (2 * 9 * x**2 * w).sum(0), rtol=1e-4)


def test_a_backward_that_is_given() -> None:
    def back(w: jax.Array, dy: jax.Array, x: jax.Array, by: float) -> dict[str, jax.Array]:
        return {"dx": scale(dy, w, by=by), "dw": (by * x * dy).sum(0)}

    kernel = adopted(backward=back, statics=("by",))
    assert kernel.gradient is not None
    assert [call.interpret for call in kernel.gradient.bind(normal(128), normal(8, 128), normal(8, 128)).calls] == [False]
    x, w = normal(8, 128), normal(128)
    np.testing.assert_allclose(jax.grad(lambda x: kernel(x, w, by=3.0).sum())(x), 3 * np.broadcast_to(w, x.shape), rtol=1e-6)
    assert adopted(backward=False).gradient is None
    assert adopted().gradient is None  # a function without a derivative of its own


@pytest.mark.parametrize("place", ["cpu", "tpu"])
def test_torch_op(scaled: Kernel, place: str, tpu: str) -> None:
    tpukern.enable(only=[])
    try:
        x, w = (torch.tensor(a, device=place, requires_grad=True) for a in (normal(2, 16, 128), normal(128)))
        y = torch.ops.adopted.scale(x, w, by=3.0)
        y.sum().backward()
        torch.testing.assert_close(y.cpu(), (x * w * 3).detach().cpu())
        torch.testing.assert_close(w.grad.cpu(), 3 * x.detach().cpu().sum((0, 1)), rtol=1e-4, atol=1e-4)
        assert torch.ops.adopted.scale(x.detach().to("meta"), w.detach().to("meta")).shape == (2, 16, 128)
    finally:
        tpukern.disable()


def test_verify_finds_what_is_wrong_and_says_that_it_cannot_judge(scaled: Kernel) -> None:
    options: dict[str, Any] = {"examples": 2, "shapes": 1, "properties": ["parity"], "scripts": False, "shrink": False}
    assert parity(scaled, **options).findings == ()
    wrong = adopted(name="wrong", sizes={"d": 128}, statics=(), reference=lambda x, w: x * w)
    assert [found.output for found in parity(wrong, **options).findings] == ["y"]
    verdict = parity(adopted(name="unjudged", sizes={"d": 128}, reference=None), **options)
    assert (verdict.unjudged, verdict.ok, verdict.findings) == ("it has no reference", False, ())


def test_compiles_for_every_chip(scaled: Kernel) -> None:
    signature = scaled.workload_signature(scaled.workloads[0])
    jobs = [Job(bound=scaled.bind_signature(signature), target=TARGETS[name]) for name in ("v5e", "v6e", "v7x")]
    assert [(one.target, one.ok, one.error) for one in compile_many(jobs)] == [(job.target.name, True, None) for job in jobs]


def test_digest_names_what_a_partial_holds() -> None:
    one, two = (adopted(functools.partial(scale, by=by), name="part") for by in (1.0, 2.0))
    assert one.source_digest() != two.source_digest()


# --- what cannot be adopted ------------------------------------------------------------------------------------------


def no_kernel(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * w


def two_results(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return scale(x, w), w


def other_result(x: jax.Array, w: jax.Array) -> jax.Array:
    return scale(x, w)[:, 0]


def needs_a_chip(x: jax.Array, w: jax.Array) -> jax.Array:
    if jax.default_backend() != "tpu":
        raise RuntimeError("this kernel runs on TPU devices only")
    return scale(x, w)


def in_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


AT = "x: bfloat16[128,256], w: bfloat16[256]"


@pytest.mark.parametrize(
    ("function", "keywords", "message"),
    [
        (3, {}, "adopt[signature]: a int; expected a JAX function."),
        (
            no_kernel,
            {},
            f"no_kernel[signature]: there is no pallas_call in it, traced at {AT}; expected one or more. "
            "What XLA compiles by itself needs no kernel.",
        ),
        (
            two_results,
            {},
            "two_results[signature]: the function returns 2 arrays, bfloat16[128,256], bfloat16[256]; expected 1 as the "
            "signature says: y: bfloat16[128,256].",
        ),
        (
            other_result,
            {},
            "other_result[signature]: the function returns bfloat16[128] for y; expected y: bfloat16[128,256] as the signature "
            "says.",
        ),
        (
            needs_a_chip,
            {},
            f"needs_a_chip[signature]: it raised RuntimeError: this kernel runs on TPU devices only, traced at {AT}; expected "
            "a function that can be traced without a TPU. What it asks of jax.devices() or jax.default_backend() has to be an "
            "argument; pltpu.get_tpu_info() is answered.",
        ),
        (
            in_torch,
            {},
            "in_torch[signature]: it raised TypeError: relu(): argument 'input' (position 1) must be Tensor, not "
            f"DynamicJaxprTracer, traced at {AT}; expected a function of JAX arrays that takes these. Give it workloads= at "
            "sizes that it takes.",
        ),
        (
            scale,
            {"signature": "x: r d, v: d -> y: r d"},
            "scale[signature]: its signature names 'v'; expected parameters of the function, "
            "['x', 'w', 'by', 'rows', 'interpret'].",
        ),
        (scale, {"signature": "x: r d, w: d"}, "scale[signature]: no '->' in its signature 'x: r d, w: d'; expected RULE."),
        (
            scale,
            {"signature": "x: r d, w -> y: r d"},
            "scale[signature]: cannot read 'w' in its signature; expected RULE.",
        ),
        (scale, {"sizes": {"c": 8}}, "scale[signature]: sizes names the dim 'c'; expected one of ['r', 'd']."),
        (
            scale,
            {"choices": {"rows": (8, 16)}},
            "scale[signature]: choices has a tuple for 'rows'; expected a tpukern.Choice.",
        ),
        (
            scale,
            {"backward": True},
            "scale[signature]: its own derivative raised ValueError: Linearization failed to produce known values for all "
            "output primals. This is typically caused by attempting to differentiate a function uses an operation that does "
            "not support reverse-mode autodiff; expected one that can be traced. Give backward= as a JAX function.",
        ),
    ],
    ids=[
        "number", "no kernel", "two results", "shape", "chip", "torch", "names", "arrow", "text", "sizes", "choice", "backward",
    ],
)  # fmt: skip
def test_what_cannot_be_adopted(function: Any, keywords: dict[str, Any], message: str) -> None:
    rule = '"x: *r d, sizes: e int32 table -> y: *r d, lse: r float32 saved"'
    with pytest.raises(SignatureError) as caught:
        adopted(function, **keywords)
    assert str(caught.value) == message.replace("RULE", rule)


def test_rules_refuse_before_the_function_is_asked(scaled: Kernel) -> None:
    with pytest.raises(SignatureError) as caught:
        scaled(normal(8, 130), normal(130))
    assert str(caught.value) == "adopted_scale[signature]: dim 'd' is 130; expected a multiple of 128."
    old = adopted(name="old", statics=(), reject=lambda c, s, target: "no v7x" if target and target.name == "v7x" else None)
    with pytest.raises(SignatureError) as caught:
        old.bind(normal(8, 128), normal(128), target="v7x")
    assert str(caught.value) == (
        "old[signature] on v7x: old(x: float32[8,128], w: float32[128]) -> y: float32[8,128] is rejected: no v7x."
    )
    assert old.bind(normal(8, 128), normal(128), target="v6e").config == {}


# --- JAX's own -------------------------------------------------------------------------------------------------------


def agrees(kernel: Kernel, *arrays: np.ndarray, atol: float = 0.05, **statics: Any) -> None:
    """Asserts that a kernel gives what its reference gives, in bfloat16."""
    low = [jnp.asarray(a, jnp.bfloat16 if a.dtype == np.float32 else a.dtype) for a in arrays]
    with using(interpret=True):
        got = np.asarray(kernel(*low, **statics), np.float32)
    exact = [torch.tensor(np.asarray(a, np.float32) if a.dtype == jnp.bfloat16 else np.asarray(a)) for a in low]
    assert kernel.reference is not None
    np.testing.assert_allclose(got, kernel.reference(*exact, **statics).numpy(), atol=atol, rtol=0.02)


def test_jax_attention(peers: ModuleType) -> None:
    q, k, v = (normal(1, 2, 128, 128, seed=n) for n in range(3))
    agrees(peers.flash, q, k, v, causal=True, sm_scale=0.1)
    agrees(peers.splash, q / 10, k, v)
    with pytest.raises(SignatureError) as caught:
        peers.flash(*(jnp.asarray(a[:, :, :100], jnp.bfloat16) for a in (q, k, v)))
    assert str(caught.value) == "flash[signature]: dim 'i' is 100; expected a multiple of 128."
    with pytest.raises(ConfigError) as refused:
        peers.flash.bind(*(jax.ShapeDtypeStruct((1, 1, 384, 128), jnp.bfloat16),) * 3, block=256)
    assert str(refused.value) == (
        "flash[config]: config block=256 is rejected: i is 384, no multiple of block 256; expected another config."
    )


def test_jax_grouped_matmul(peers: ModuleType) -> None:
    agrees(peers.gmm, normal(256, 64), normal(3, 64, 96, seed=1), np.asarray([100, 0, 156], np.int32))


def test_jax_paged_attention(peers: ModuleType) -> None:
    pages = (normal(2, 8, 16, 128, seed=n) for n in (1, 2))
    agrees(
        peers.paged, normal(2, 16, 128) / 10, *pages, np.asarray([50, 7], np.int32),
        np.asarray([[3, 1, 0, 2], [7, 6, 5, 4]], np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["flash", "splash", "gmm", "paged"])
def test_jax_kernels_lower_for_every_chip(peers: ModuleType, name: str) -> None:
    kernel = getattr(peers, name)
    for target in ("v5e", "v6e", "v7x"):
        bound = kernel.bind_signature(kernel.workload_signature(kernel.workloads[-1]), target=target)
        assert len(tpukern.lower(bound, target).mosaic) == 1
