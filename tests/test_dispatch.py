"""Kernels as torch ops: values, gradients, what is shown and what is saved, configs, empty sizes, layouts, autocast."""

import jax.numpy as jnp
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tpukern import calling, explanation
from tpukern.dsl import F32, Block, Choice, Dim, In, Out, Ref, Scalar, kernel

DEVICES = ["cpu", "tpu"]


def exponential_reference(x: torch.Tensor, w: torch.Tensor, *, alpha: float) -> torch.Tensor:
    return torch.exp(alpha * x) * w


@kernel(op="dispatch_test::exponential", reference=exponential_reference)
def exponential(
    x: Ref = In("*r d"),
    w: Ref = In("_ d"),
    y: Ref = Out("*r d"),
    e: Ref = Out("*r d", "float32", saved=True),
    *,
    alpha: float = 1.0,
    r: Dim = Block(8, 16, default=8),
) -> None:
    """y = exp(alpha x) w; keeps the exponential."""
    e[...] = jnp.exp(alpha * x[...].astype(F32))
    y[...] = (e[...] * w[...].astype(F32)).astype(y.dtype)


@exponential.backward
@kernel(op="dispatch_test::exponential_gradients")
def exponential_gradients(
    w: Ref = In("_ d"),
    e: Ref = In("*r d", "float32"),
    dy: Ref = In("*r d"),
    dx: Ref = Out("*r d"),
    dw: Ref = Out("_ d", "float32", init=0.0),
    *,
    alpha: float = 1.0,
    r: Dim = Block(8, 16, default=8),
) -> None:
    g = dy[...].astype(F32) * e[...]
    dx[...] = (alpha * g * w[...].astype(F32)).astype(dx.dtype)
    dw[...] += jnp.sum(g, axis=0, keepdims=True)


@kernel(op="dispatch_test::two")
def two(
    x: Ref = In("m n"),
    s: Ref = Scalar("float32"),
    p: Ref = Out("m n"),
    q: Ref = Out("m n", "float32"),
    *,
    sign: int = 1,
    mode: str = "plain",
    twice: bool = False,
    shift: float | None = None,
    factor: float = Choice(2.0, 4.0),
    m: Dim = Block(8, 16, default=8),
) -> None:
    value = sign * x[...].astype(F32) + s[0] + (shift or 0.0)
    p[...] = (value * (2 if twice else 1)).astype(p.dtype)
    q[...] = value * factor if mode == "plain" else -value


@two.backward
def two_backward(dp, dq, sign, twice, shift):  # type: ignore[no-untyped-def]
    return {"dx": sign * (dp * (2 if twice else 1) + 2.0 * dq.astype(dp.dtype)), "ds": jnp.zeros(())}


def tensors(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]
    return [t.detach().requires_grad_() for t in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients(tpu: str, device: str, dtype: torch.dtype) -> None:
    x, w = tensors(device, dtype, (3, 7, 24), (24,))
    y = exponential(x, w, alpha=0.5)
    assert isinstance(y, torch.Tensor)
    assert (y.device.type, y.dtype, y.is_contiguous()) == (device, dtype, True)
    (y.float() ** 2).sum().backward()
    a, b = (t.detach().cpu().double().requires_grad_() for t in (x, w))
    expected = exponential_reference(a, b, alpha=0.5)
    (expected**2).sum().backward()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(y.detach().cpu().double(), expected.detach(), **close)
    for mine, theirs in ((x, a), (w, b)):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.cpu().double(), theirs.grad, rtol=close["rtol"], atol=close["atol"] * 20)


@pytest.mark.parametrize("device", DEVICES)
def test_the_op_returns_what_is_saved_and_does_not_differentiate_it(tpu: str, device: str) -> None:
    x, w = tensors(device, torch.float32, (9, 16), (16,))
    y, e = torch.ops.dispatch_test.exponential(x, w, alpha=0.25)
    assert (y.requires_grad, e.requires_grad) == (True, False)
    torch.testing.assert_close(e.cpu(), torch.exp(0.25 * x.detach().cpu()))


@pytest.mark.parametrize("device", DEVICES)
def test_only_gradients_that_are_needed(tpu: str, device: str) -> None:
    x, w = tensors(device, torch.float32, (9, 16), (16,))
    x.requires_grad_(False)
    exponential(x, w).sum().backward()
    assert x.grad is None
    assert w.grad is not None
    torch.testing.assert_close(w.grad.cpu(), torch.exp(x.cpu()).sum(0))


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_without_a_cotangent_counts_as_zero(tpu: str, device: str) -> None:
    (x,) = tensors(device, torch.float32, (9, 16))
    p, q = two(x, 1.5, sign=-1)
    q.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), torch.full((9, 16), -2.0))
    torch.testing.assert_close(p.detach().cpu(), 1.5 - x.detach().cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_statics_choices_and_blocks_are_keywords(tpu: str, device: str) -> None:
    (x,) = tensors(device, torch.float32, (20, 16))
    explanation.reset()
    p, q = two(x, 1, twice=True, shift=0.5, factor=4.0, block_m=16)
    torch.testing.assert_close(p.detach().cpu(), 2 * (x.detach().cpu() + 1.5))
    torch.testing.assert_close(q.detach().cpu(), 4 * (x.detach().cpu() + 1.5))
    _, q = two(x, 1, mode="other", config="block_m=8,factor=4.0")
    torch.testing.assert_close(q.detach().cpu(), -(x.detach().cpu() + 1))
    rows = [row for row in explanation.explain().rows if row.op == "dispatch_test::two"]
    assert sorted(row.config for row in rows) == ["block_m=16,factor=4.0", "block_m=8,factor=4.0"]


def test_the_schema_comes_from_the_declaration() -> None:
    assert str(calling.registered(two).overload._schema) == (
        'dispatch_test::two(Tensor x, Tensor s, *, int sign=1, str mode="plain", bool twice=False, float? shift=None, '
        'str config="") -> (Tensor, Tensor)'
    )
    assert calling.registered(two).shown == (0, 1)
    assert calling.registered(exponential).shown == (0,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 16), (5, 0), (2, 0, 16)])
def test_empty_sizes(tpu: str, device: str, shape: tuple[int, ...]) -> None:
    x, w = tensors(device, torch.float32, shape, shape[-1:])
    y = exponential(x, w)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert w.grad is not None
    assert w.grad.cpu().tolist() == [0.0] * shape[-1]


def sum_reference(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


@kernel(op="dispatch_test::row_sum", reference=sum_reference)
def row_sum(
    x: Ref = In("m k"),
    y: Ref = Out("m _", init=0.0),
    *,
    m: Dim = Block(8, default=8),
    k: Dim = Block(128, default=128),
) -> None:
    y[...] += jnp.sum(x[...], axis=1, keepdims=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_over_nothing_is_the_references(tpu: str, device: str) -> None:
    explanation.reset()
    assert row_sum(torch.ones(3, 0, device=device)).cpu().tolist() == [0.0, 0.0, 0.0]
    (row,) = [row for row in explanation.explain().rows if row.op == "dispatch_test::row_sum"]
    assert (row.calls, row.config, row.reason) == (1, "", "a summed dim is 0: the reference ran")


@pytest.mark.parametrize("device", DEVICES)
def test_strided_and_expanded_operands(tpu: str, device: str) -> None:
    (x,) = tensors(device, torch.float32, (16, 24))
    w = torch.ones(1, device=device).expand(16)
    y = exponential(x.detach().T, w)
    torch.testing.assert_close(y.cpu(), torch.exp(x.detach().cpu().T))


@pytest.mark.parametrize("device", DEVICES)
def test_a_launch_gives_the_layout_asked_for(tpu: str, device: str) -> None:
    x, w = (t.detach() for t in tensors(device, torch.float32, (2, 3, 8), (8,)))
    y, e = exponential.launch(x, w, layouts={"y": (1, 0, 2)}, alpha=2.0)
    assert (y.shape, y.stride(), e.stride()) == ((2, 3, 8), (8, 16, 1), (24, 8, 1))
    torch.testing.assert_close(y.cpu(), exponential_reference(x.cpu(), w.cpu(), alpha=2.0))


def test_cpu_results_share_no_memory_with_operands() -> None:
    @kernel(op="dispatch_test::same")
    def same(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
        y[...] = x[...]

    @same.backward
    def same_backward(dy):  # type: ignore[no-untyped-def]
        return {"dx": dy}

    given = torch.ones(8, 8)
    (gradient,) = (torch.ops.dispatch_test.same_backward(given),)
    gradient.add_(1)
    assert given.sum().item() == 64


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_casts_operands_that_share_the_element_type(tpu: str, device: str) -> None:
    x, w = tensors(device, torch.float32, (9, 16), (16,))
    with torch.autocast(device, dtype=torch.bfloat16):
        y, e = torch.ops.dispatch_test.exponential(x, w)
    assert (y.dtype, e.dtype) == (torch.bfloat16, torch.float32)
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad.cpu(), y.detach().float().cpu(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_64_bit_operands_stay_64_bit(tpu: str, dtype: str) -> None:
    @kernel(op=f"dispatch_test::plus_one_{dtype}", dtypes=(dtype,))
    def plus_one(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
        y[...] = x[...] + 1

    big = torch.full((8, 8), 2**40, dtype=getattr(torch, dtype))
    for device in DEVICES:
        found = plus_one(big.to(device)).cpu()
        assert found.dtype == big.dtype
        assert torch.equal(found, big + 1)


def test_a_kernel_declared_again_takes_its_op_over() -> None:
    def declare(offset: float):  # type: ignore[no-untyped-def]
        @kernel(op="dispatch_test::again")
        def again(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
            y[...] = x[...] + offset

        return again

    first, x = declare(1.0), torch.zeros(8, 8)
    assert first(x).max().item() == 1.0
    second = declare(2.0)
    assert second(x).max().item() == 2.0
    assert torch.ops.dispatch_test.again(x).max().item() == 2.0


def test_torch_checks_the_op(tpu: str) -> None:
    x, w = tensors("cpu", torch.float32, (9, 16), (16,))
    torch.library.opcheck(torch.ops.dispatch_test.exponential.default, (x, w), {"alpha": 0.5})


@pytest.mark.parametrize("device", DEVICES)
def test_shapes_may_be_symbols(tpu: str, device: str) -> None:
    x, w = (t.detach() for t in tensors(device, torch.float32, (5, 7, 16), (16,)))
    graph = make_fx(lambda x, w: torch.ops.dispatch_test.exponential(x, w), tracing_mode="symbolic")(x, w)
    (node,) = [node for node in graph.graph.nodes if "exponential" in str(node.target)]
    y, e = node.meta["val"]
    assert all(isinstance(size, torch.SymInt) for size in (*y.shape, *e.shape))
    assert (e.dtype, e.device.type) == (torch.float32, device)
    x, w = (t.detach() for t in tensors(device, torch.float32, (3, 9, 8), (8,)))  # no guard holds the sizes fixed
    torch.testing.assert_close(graph(x, w)[0].cpu(), exponential_reference(x.cpu(), w.cpu(), alpha=1.0))
