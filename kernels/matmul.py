"""Matrix products in the three operand orders that a linear layer and its gradients need, and the layer itself.

    matmul       y = x w                  x (*m, k), w (k, n)
    matmul_nt    y = x w^T                x (*m, k), w (n, k)
    matmul_tn    y = x^T w                x (*k, m), w (*k, n)
    linear       y = act(x w^T + b)       x (*m, k), w (n, k), b (n,)

No operand is transposed in memory: each order names other axes to the MXU. float32 or bfloat16 operands; sums, bias and
activation in float32, rounded once. float32 products are computed at full precision (six bfloat16 passes), not at the
chip's default of one. Sums over nothing (k = 0) are ATen's. The overrides of ``mm``, ``addmm`` and ``linear`` are opt-in:
XLA's own matmul is as good.

Source: the blocked product with a resident accumulator, as in JAX's Pallas matmul documentation.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tpukern.dsl import F32, Acc, Block, Config, Dim, In, Out, Override, Ref, Signature, Workload, dot, kernel

if TYPE_CHECKING:
    from torch import Tensor

    from tpukern.targets import Target

Activation = Callable[[jax.Array], jax.Array]
Act = Literal["none", "relu", "silu", "gelu", "gelu_tanh"]

ACTIVATIONS: Mapping[str, Activation] = {
    "none": lambda z: z,
    "relu": lambda z: jnp.maximum(z, 0.0),
    "silu": lambda z: z * jax.nn.sigmoid(z),
    "gelu": lambda z: 0.5 * z * (1.0 + jax.lax.erf(z * 0.5**0.5)),
    "gelu_tanh": lambda z: z * jax.nn.sigmoid(z * (1.0 + 0.044715 * z * z) * 2 * (2 / math.pi) ** 0.5),  # 1 + tanh(u) cancels
}


M = Block(128, 256, 512, 1024, default=512)
N = Block(128, 256, 512, 1024, 2048, default=1024)
K = Block(128, 256, 512, 1024, 2048, default=1024)

TOLERANCE = {"float32": 4, "bfloat16": 1}

LLAMA = "meta-llama/Meta-Llama-3-8B config: hidden_size 4096 (32 heads of 128), intermediate_size 14336, vocab_size 128256"
QWEN = "Qwen/Qwen3-8B config: hidden_size 4096, intermediate_size 12288"
QWEN_MOE = "Qwen/Qwen3-30B-A3B config: hidden_size 2048, moe_intermediate_size 768; 8192 tokens to 8 of 128 experts each"
VIT = "google/vit-large-patch16-224 config: hidden_size 1024, intermediate_size 4096, gelu; 64 images of 197 tokens"


def reject(config: Config, signature: Signature, target: "Target | None") -> str | None:
    """Prunes float32 blocks whose products do not fit: the six bfloat16 passes keep three parts of each operand around."""
    if target is None or signature.dtype != "float32":
        return None
    m, n, k = (min(config[f"block_{dim}"], signature.sizes[dim]) for dim in "mnk")
    needed_bytes = 4 * (int(3.5 * k * (m + n)) + 4 * m * n)  # two windows and 3/2 for the parts; y twice, acc, product
    if needed_bytes <= target.scoped_vmem_bytes:
        return None
    return f"about {needed_bytes / 2**20:.1f} MiB of VMEM, {target.name} has {target.scoped_vmem_bytes / 2**20:.0f} MiB"


def matmul_reference(x: "Tensor", w: "Tensor") -> "Tensor":
    return x @ w


def matmul_nt_reference(x: "Tensor", w: "Tensor") -> "Tensor":
    return x @ w.mT


def matmul_tn_reference(x: "Tensor", w: "Tensor") -> "Tensor":
    return x.reshape(-1, x.shape[-1]).mT @ w.reshape(-1, w.shape[-1])


def linear_reference(x: "Tensor", w: "Tensor", b: "Tensor", *, act: str) -> "Tensor":
    import torch.nn.functional as F

    z = F.linear(x, w, b)
    if act == "none":
        return z
    return F.gelu(z, approximate="tanh") if act == "gelu_tanh" else getattr(F, act)(z)


def unsupported(*operands: "Tensor") -> str | None:
    """Why ATen's own kernel has to serve these operands, or None."""
    first = operands[0]
    if str(first.dtype) not in ("torch.float32", "torch.bfloat16"):
        return f"an operand is {first.dtype}, the kernel has float32 and bfloat16"
    for other in operands[1:]:
        if other.dtype != first.dtype:
            return f"operands are {first.dtype} and {other.dtype}"
    if any(operand.numel() == 0 for operand in operands):
        return "an operand is empty"
    return None


def is_transposed(a: "Tensor") -> bool:
    """Whether the matrix `a` is a transposed view of a row-major one."""
    return not a.is_contiguous() and a.t().is_contiguous()


def mm_cond(a: "Tensor", b: "Tensor") -> str | None:
    return unsupported(a, b)


def mm_impl(a: "Tensor", b: "Tensor") -> "Tensor":
    if is_transposed(a):
        return matmul_tn.launch(a.t(), b)
    if is_transposed(b):
        return matmul_nt.launch(a, b.t())
    return matmul.launch(a, b)


def addmm_cond(bias: "Tensor", a: "Tensor", b: "Tensor", *, beta: float = 1, alpha: float = 1) -> str | None:
    if beta != 1 or alpha != 1:
        return f"beta is {beta} and alpha {alpha}, the kernel has 1 and 1"
    if bias.dim() != 1 or bias.shape[0] != b.shape[1]:
        return f"the bias has shape {list(bias.shape)}, the kernel takes one value a column"
    if not is_transposed(b):
        return "mat2 is not the transposed view of a row-major weight"
    return unsupported(a, b, bias)


def addmm_impl(bias: "Tensor", a: "Tensor", b: "Tensor", *, beta: float = 1, alpha: float = 1) -> "Tensor":
    return linear.launch(a, b.t(), bias, act="none")


def linear_cond(x: "Tensor", w: "Tensor", bias: "Tensor | None" = None) -> str | None:
    if w.dim() != 2:
        return f"the weight has rank {w.dim()}, the kernel takes 2"
    return unsupported(x, w) if bias is None else unsupported(x, w, bias)


def linear_impl(x: "Tensor", w: "Tensor", bias: "Tensor | None" = None) -> "Tensor":
    return matmul_nt(x, w) if bias is None else linear(x, w, bias)


@kernel(
    op="tpukern::matmul",
    reference=matmul_reference,
    overrides=(Override("aten::mm", impl=mm_impl, cond=mm_cond, opt_in=True),),
    workloads=(
        Workload("llama3_8b_gate", m=8192, k=4096, n=14336, source=LLAMA),
        Workload("qwen3_30b_a3b_expert", m=512, k=2048, n=768, source=QWEN_MOE),
    ),
    tolerance=TOLERANCE,
    reject=reject,
)
def matmul(
    x: Ref = In("*m k"),
    w: Ref = In("k n"),
    y: Ref = Out("*m n"),
    acc: Ref = Acc("m n"),
    *,
    m: Dim = M,
    n: Dim = N,
    k: Dim = K,
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        y[...] = acc[...].astype(y.dtype)


@kernel(
    op="tpukern::matmul_nt",
    reference=matmul_nt_reference,
    workloads=(
        Workload("llama3_8b_lm_head", m=8192, k=4096, n=128256, source=LLAMA),
        Workload("qwen3_8b_down_f32", dtype="float32", m=4096, k=12288, n=4096, source=QWEN),
    ),
    tolerance=TOLERANCE,
    reject=reject,
)
def matmul_nt(
    x: Ref = In("*m k"),
    w: Ref = In("n k"),
    y: Ref = Out("*m n"),
    acc: Ref = Acc("m n"),
    *,
    m: Dim = M,
    n: Dim = N,
    k: Dim = K,
) -> None:
    acc[...] += dot(x[...], w[...], ((1,), (1,)))

    @pl.when(k.last)
    def _() -> None:
        y[...] = acc[...].astype(y.dtype)


@kernel(
    op="tpukern::matmul_tn",
    reference=matmul_tn_reference,
    workloads=(Workload("llama3_8b_query_grad", k=8192, m=4096, n=4096, source=LLAMA),),
    tolerance=TOLERANCE,
    reject=reject,
)
def matmul_tn(
    x: Ref = In("*k m"),
    w: Ref = In("*k n"),
    y: Ref = Out("m n"),
    acc: Ref = Acc("m n"),
    *,
    m: Dim = M,
    n: Dim = N,
    k: Dim = K,
) -> None:
    acc[...] += dot(x[...], w[...], ((0,), (0,)))

    @pl.when(k.last)
    def _() -> None:
        y[...] = acc[...].astype(y.dtype)


@kernel(
    op="tpukern::linear",
    reference=linear_reference,
    overrides=(
        Override("aten::addmm", impl=addmm_impl, cond=addmm_cond, opt_in=True),
        Override("aten::linear", impl=linear_impl, cond=linear_cond, keys=("PrivateUse1", "AutogradPrivateUse1"), opt_in=True),
    ),
    workloads=(
        Workload("vit_l16_qkv", m=64 * 197, k=1024, n=1024, source=VIT),
        Workload("vit_l16_mlp", m=64 * 197, k=1024, n=4096, act="gelu", source=VIT),
    ),
    tolerance={"float32": 14, "bfloat16": 2},  # silu with the chip's exponential errs by 6.2 in float32
    reject=reject,
)
def linear(
    x: Ref = In("*m k"),
    w: Ref = In("n k"),
    b: Ref = In("_ n"),
    y: Ref = Out("*m n"),
    acc: Ref = Acc("m n"),
    *,
    act: Act = "none",
    m: Dim = M,
    n: Dim = N,
    k: Dim = K,
) -> None:
    acc[...] += dot(x[...], w[...], ((1,), (1,)))

    @pl.when(k.last)
    def _() -> None:
        y[...] = ACTIVATIONS[act](acc[...] + b[...].astype(F32)).astype(y.dtype)


@kernel(reject=reject)
def linear_dz(
    x: Ref = In("*m k"),
    w: Ref = In("n k"),
    b: Ref = In("_ n"),
    dy: Ref = In("*m n"),
    dz: Ref = Out("*m n"),
    acc: Ref = Acc("m n"),
    *,
    act: Act = "none",
    m: Dim = M,
    n: Dim = N,
    k: Dim = K,
) -> None:
    """Gradient of what goes into the activation, which is computed again instead of being kept."""
    acc[...] += dot(x[...], w[...], ((1,), (1,)))

    @pl.when(k.last)
    def _() -> None:
        z = acc[...] + b[...].astype(F32)
        slope = jax.jvp(ACTIVATIONS[act], (z,), (jnp.ones_like(z),))[1]
        dz[...] = (dy[...].astype(F32) * slope).astype(dz.dtype)


def product_tn(x: jax.Array, dy: jax.Array) -> jax.Array:
    """x^T dy over all leading axes; zeros where there is no row to sum over."""
    return matmul_tn(x, dy) if x.size and dy.size else jnp.zeros((x.shape[-1], dy.shape[-1]), x.dtype)


@matmul.backward
def matmul_backward(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
    return {"dx": matmul_nt(dy, w), "dw": product_tn(x, dy)}


@matmul_nt.backward
def matmul_nt_backward(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
    return {"dx": matmul(dy, w), "dw": product_tn(dy, x)}


@matmul_tn.backward
def matmul_tn_backward(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
    return {"dx": matmul_nt(w, dy), "dw": matmul(x, dy)}


@linear.backward
def linear_backward(
    x: jax.Array, w: jax.Array, b: jax.Array, y: jax.Array, dy: jax.Array, act: str = "none"
) -> dict[str, jax.Array]:
    if act == "none":
        dz = dy
    elif act == "relu":  # the output tells where the slope is 1
        dz = jnp.where(y > 0, dy, jnp.zeros_like(dy))
    else:
        dz = linear_dz(x, w, b, dy, act=act)
    db = jnp.sum(dz.astype(F32), axis=tuple(range(dz.ndim - 1)))
    return {"dx": matmul(dz, w), "dw": product_tn(dz, x), "db": db.astype(b.dtype)}
