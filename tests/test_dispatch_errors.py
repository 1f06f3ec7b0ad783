"""What a call on tensors cannot have is said before anything reaches torch_tpu, whole and in one form."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from tpukern import kernels
from tpukern.dsl import Acc, Block, Dim, In, Out, Ref, kernel
from tpukern.errors import ConfigError, LowerError, OverrideError, SignatureError, TpukernError

DEVICES = ["cpu", "tpu"]


@kernel(op="dispatch_errors::product")
def product(
    x: Ref = In("*m k"),
    w: Ref = In("k n"),
    y: Ref = Out("*m n"),
    acc: Ref = Acc("m n"),
    *,
    act: Any = jnp.tanh,
    scale: float = 1.0,
    m: Dim = Block(8, 16, default=8),
    n: Dim = Block(128),
    k: Dim = Block(128),
) -> None:
    acc[...] += scale * jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)
    y[...] = act(acc[...]).astype(y.dtype)


@kernel
def without_op(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
    y[...] = x[...]


@kernel(op="dispatch_errors::raises")
def raises(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
    y[...] = x[...] + jnp.ones((3, 3))


def build_wrong(signature: Any, config: Any) -> Callable[..., Any]:
    return lambda x: x[:1] if signature.sizes["m"] > 1 else x.astype(jnp.bfloat16)


@kernel(op="dispatch_errors::wrong", build=build_wrong)
def wrong(x: Ref = In("m n"), y: Ref = Out("m n")) -> None: ...


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


CALLS: list[tuple[str, Callable[[str], Any], type[TpukernError], str]] = [
    (
        "rank",
        lambda d: product(zeros(8, 4, device=d), zeros(4, device=d)),
        SignatureError,
        'product[signature]: w has shape (4,), rank 1; expected "k n", rank 2.',
    ),
    (
        "size",
        lambda d: product(zeros(8, 4, device=d), zeros(5, 4, device=d)),
        SignatureError,
        'product[signature]: dim \'k\' is 5 on w "k n" but 4 on x "*m k"; expected one size.',
    ),
    (
        "dtype",
        lambda d: product(zeros(8, 4, dtype=torch.float16, device=d), zeros(4, 4, dtype=torch.float16, device=d)),
        SignatureError,
        "product[signature]: x has dtype float16; expected one of ['bfloat16', 'float32'].",
    ),
    (
        "mixed dtypes",
        lambda d: product(zeros(8, 4, device=d), zeros(4, 4, dtype=torch.bfloat16, device=d)),
        SignatureError,
        "product[signature]: w has dtype bfloat16 but x has float32; expected one element type. "
        "Cast one, or give w a dtype of its own.",
    ),
    (
        "count",
        lambda d: product(zeros(8, 4, device=d)),
        SignatureError,
        'product[signature]: 1 arrays; expected 2: x "*m k", w "k n".',
    ),
    (
        "no tensor",
        lambda d: product(zeros(8, 4, device=d), 3),
        SignatureError,
        "product[signature]: w is a int; expected a tensor.",
    ),
    (
        "a list",
        lambda d: product.launch(zeros(8, 4, device=d), [1, 2]),
        SignatureError,
        "product[signature]: w is a list; expected a tensor.",
    ),
    (
        "unknown keyword",
        lambda d: product(zeros(8, 4, device=d), zeros(4, 4, device=d), block_mm=8),
        ConfigError,
        "product[config]: no keyword 'block_mm'; expected one of ['act', 'scale', 'block_m', 'block_n', 'block_k']. "
        "Did you mean 'block_m'.",
    ),
    (
        "bad block",
        lambda d: product(zeros(32, 4, device=d), zeros(4, 4, device=d), block_m=12),
        ConfigError,
        "product[config]: block_m = 12; expected a multiple of 8, or at least the size of the dim.",
    ),
    (
        "bad config",
        lambda d: product(zeros(8, 4, device=d), zeros(4, 4, device=d), config="block_m"),
        ConfigError,
        "config[config]: 'block_m' in 'block_m'; expected key=value, separated by commas.",
    ),
    (
        "no place for a static",
        lambda d: product(zeros(8, 4, device=d), zeros(4, 4, device=d), act=abs),
        ConfigError,
        "product[config]: static argument act = <built-in function abs> cannot be an argument of a torch op; "
        "expected a bool, int, float or str. Call the kernel on jax arrays, or fix it.",
    ),
    (
        "layout of no output",
        lambda d: product.launch(zeros(8, 4, device=d), zeros(4, 4, device=d), layouts={"z": (0, 1)}),
        SignatureError,
        "product[signature]: a layout for 'z'; expected one of the outputs ['y'].",
    ),
    (
        "bad layout",
        lambda d: product.launch(zeros(8, 4, device=d), zeros(4, 4, device=d), layouts={"y": (0, 2)}),
        SignatureError,
        "product[signature]: layout (0, 2) of y; expected an order of the axes 0 to 1.",
    ),
    (
        "no op",
        lambda d: without_op(zeros(8, 4, device=d)),
        OverrideError,
        "without_op[override]: the kernel has no torch op; expected one for tensors of torch. "
        'Declare it: @kernel(op="my::name").',
    ),
    (
        "wrong shape out",
        lambda d: wrong(zeros(8, 4, device=d)),
        SignatureError,
        "wrong[signature]: build gave float32[1,4] for y; expected y: float32[8,4].",
    ),
    (
        "wrong dtype out",
        lambda d: wrong(zeros(1, 4, device=d)),
        SignatureError,
        "wrong[signature]: build gave bfloat16[1,4] for y; expected y: float32[1,4].",
    ),
    (
        "zero summed dim without a reference",
        lambda d: product(zeros(8, 0, device=d), zeros(0, 4, device=d)),
        SignatureError,
        "product[signature]: 'k' is 0, the output is not empty, and the kernel has no reference; "
        "expected a size of 1 or more, or a reference to say what the output is.",
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("call", "kind", "message"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_messages(tpu: str, device: str, call: Callable[[str], Any], kind: type[TpukernError], message: str) -> None:
    for _ in range(2):  # the second time must not find a way past
        with pytest.raises(kind) as caught:
            call(device)
        assert str(caught.value) == message


@pytest.mark.parametrize("device", DEVICES)
def test_a_body_that_raises(tpu: str, device: str) -> None:
    with pytest.raises(LowerError) as caught:
        raises(zeros(8, 4, device=device))
    assert str(caught.value) == (
        "raises[lower]: TypeError: add got incompatible shapes for broadcasting: (8, 4), (3, 3).; "
        "expected a body that JAX can trace."
    )
    assert isinstance(caught.value.__cause__, TypeError)


def test_mixed_devices(tpu: str) -> None:
    x, w = zeros(8, 4, device="tpu"), zeros(4, 4)
    for _ in range(2):
        with pytest.raises(SignatureError) as caught:
            product(x, w)
        assert (
            str(caught.value) == "product[signature]: w is on cpu, other operands on tpu; expected all operands on one device."
        )
        product(x, w.to("tpu"))  # such a call is known from now on
    with pytest.raises(SignatureError) as caught:
        product.launch(zeros(8, 4), zeros(4, 4, device="tpu"))
    assert str(caught.value) == "product[signature]: x is on cpu, other operands on tpu; expected all operands on one device."


def test_no_gradient(tpu: str) -> None:
    for device in DEVICES:
        x, w = zeros(8, 4, device=device).requires_grad_(), zeros(4, 4, device=device)
        with pytest.raises(OverrideError) as caught:
            product(x, w).sum().backward()
        assert str(caught.value) == "product[override]: it has no backward; expected one, declared with @product.backward."


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("nonsense", "fresh[override]: op 'nonsense'; expected namespace::name."),
        ("a::b::c", "fresh[override]: op 'a::b::c'; expected namespace::name."),
        (
            "aten::fresh",
            "fresh[override]: op 'aten::fresh' is in a namespace of PyTorch's; expected one of your own. "
            "Use Override for ATen ops.",
        ),
        (
            "dispatch_errors::product",
            f"fresh[override]: op 'dispatch_errors::product' is that of kernel product in {__name__}; "
            "expected one kernel for each op. Give one of them another op.",
        ),
    ],
)
def test_ops_that_cannot_be(op: str, message: str) -> None:
    with pytest.raises(OverrideError) as caught:

        @kernel(op=op)
        def fresh(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
            y[...] = x[...]

    assert str(caught.value) == message
    assert product(zeros(8, 4), zeros(4, 4)).shape == (8, 4)


def test_an_op_of_another_library_is_not_taken() -> None:
    library = torch.library.Library("dispatch_errors_theirs", "DEF")
    library.define("op(Tensor x) -> Tensor")
    with pytest.raises(OverrideError) as caught:

        @kernel(op="dispatch_errors_theirs::op")
        def fresh(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
            y[...] = x[...]

    assert str(caught.value).startswith("fresh[override]: op 'dispatch_errors_theirs::op' cannot be defined: ")
    assert str(caught.value).endswith("; expected a name that is free.")


@pytest.mark.parametrize("device", DEVICES)
def test_static_arguments_of_another_type(tpu: str, device: str) -> None:
    x, w = torch.ones(8, 128, device=device), torch.ones(128, 128, device=device)
    for value, kind in (("2", "str"), (None, "NoneType"), ([1.0], "list")):
        with pytest.raises(ConfigError) as caught:
            product(x, w, scale=value)
        assert str(caught.value) == f"product[config]: scale = {value!r} is a {kind}; expected float."


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_forward_mode_is_refused_and_not_dropped(tpu: str, device: str) -> None:
    x, w = torch.ones(8, 128, device=device), torch.ones(128, 128, device=device)
    message = (
        "product[override]: x has a tangent, of forward-mode differentiation (torch.func.jvp, dual_level); "
        "expected reverse mode, the one that kernels have. Use torch.autograd.grad."
    )
    with pytest.raises(OverrideError) as caught:
        torch.func.jvp(lambda x: product(x, w), (x,), (x,))
    assert str(caught.value) == message
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(OverrideError) as caught:
            product(torch.autograd.forward_ad.make_dual(x, x), w)
        assert str(caught.value) == message
        assert product(x, w).shape == (8, 128)


def test_kernels_are_copied_and_pickled_as_functions_are() -> None:
    assert copy.deepcopy({"act": product})["act"] is product
    assert copy.copy(product) is product
    assert pickle.loads(pickle.dumps(product)) is product
    assert pickle.loads(pickle.dumps(kernels.rms_norm)) is kernels.rms_norm  # its module has its name

    @kernel
    def local(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
        y[...] = x[...]

    with pytest.raises(pickle.PicklingError) as caught:
        pickle.dumps(local)
    place = f"{__name__}.test_kernels_are_copied_and_pickled_as_functions_are.<locals>.local"
    rule = "a kernel declared at the top of a module, under the name of its function"
    assert str(caught.value) == f"local[pickle]: it is not {place}; expected {rule}."
