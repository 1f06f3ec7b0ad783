"""Every error that a kernel's author or caller can cause, message whole."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from tpukern.dsl import F32, Acc, Block, Choice, Dim, Each, In, Kernel, Out, Prefetch, Ref, Scalar, dot, kernel
from tpukern.errors import ConfigError, LowerError, SignatureError


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def misspelt_dim() -> Any:
    def f(x: Ref = In("rows d"), y: Ref = Out("row d"), *, rows: Dim = Block(8)) -> None: ...

    return f


def misspelt_block() -> Any:
    def f(x: Ref = In("rows d"), y: Ref = Out("rows d"), *, row: Dim = Block(8)) -> None: ...

    return f


def no_spec() -> Any:
    def f(x: Ref = In("r d"), y: Any = None, *, r: Dim = Block(8)) -> None: ...

    return f


def block_before_star() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d"), r: Dim = Block(8)) -> None: ...

    return f


def each_before_star() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d"), r: Dim = Each()) -> None: ...

    return f


def grid_order() -> Any:
    def f(
        x: Ref = In("m k"),
        w: Ref = In("k n"),
        y: Ref = Out("m n"),
        *,
        k: Dim = Block(128),
        m: Dim = Block(128),
        n: Dim = Block(128),
    ) -> None: ...

    return f


def bad_token() -> Any:
    def f(x: Ref = In("r d-1"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None: ...

    return f


def bad_group() -> Any:
    def f(x: Ref = In("r (a 2b)"), y: Ref = Out("r a")) -> None: ...

    return f


def bad_lookup() -> Any:
    def f(x: Ref = In("r p:page[0]"), y: Ref = Out("r p")) -> None: ...

    return f


def star_not_first() -> Any:
    def f(x: Ref = In("r *d"), y: Ref = Out("r *d")) -> None: ...

    return f


def two_stars() -> Any:
    def f(x: Ref = In("*r d"), w: Ref = In("*s d"), y: Ref = Out("*r d")) -> None: ...

    return f


def one_axis() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r"), *, r: Dim = Block(8)) -> None: ...

    return f


def no_output() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Acc("r d")) -> None: ...

    return f


def reserved_name() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d"), *, order: int = 1) -> None: ...

    return f


def reserved_block() -> Any:
    def f(block_r: Ref = In("r d"), y: Ref = Out("r d")) -> None: ...

    return f


def unknown_dtype() -> Any:
    def f(x: Ref = In("r d", "f32"), y: Ref = Out("r d", "float32")) -> None: ...

    return f


def misspelt_dtype() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d", "float3")) -> None: ...

    return f


def float_table() -> Any:
    def f(t: Ref = Prefetch("n", "float32"), x: Ref = In("r d"), y: Ref = Out("r d")) -> None: ...

    return f


def fill_of_int() -> Any:
    def f(x: Ref = In("r d", "int32", fill=-1e30), y: Ref = Out("r d", "int32")) -> None: ...

    return f


def init_of_int() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d", "int8", init=300)) -> None: ...

    return f


def empty_block() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block()) -> None: ...

    return f


def odd_default() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8, 16, default=32)) -> None: ...

    return f


def empty_choice() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d"), *, how: str = Choice()) -> None: ...

    return f


def odd_choice() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d"), *, how: str = Choice("a", "b", default="c")) -> None: ...

    return f


def unsolvable_group() -> Any:
    def f(x: Ref = In("r (a b)"), y: Ref = Out("r (a b)")) -> None: ...

    return f


def unsolvable_per() -> Any:
    def f(x: Ref = In("r k/128"), y: Ref = Out("r k/128")) -> None: ...

    return f


def group_not_each() -> Any:
    def f(
        x: Ref = In("r (a b)"), s: Ref = In("a b _"), y: Ref = Out("r (a b)"), *, a: Dim = Block(8), b: Dim = Each()
    ) -> None: ...

    return f


def misspelt_table() -> Any:
    def f(
        page: Ref = Prefetch("t"), x: Ref = In("p:pages[t] s d"), y: Ref = Out("t s d"), *, t: Dim = Each(), p: Dim = Each()
    ) -> None: ...

    return f


def table_rank() -> Any:
    def f(
        page: Ref = Prefetch("b t"),
        x: Ref = In("p:page[t] s d"),
        y: Ref = Out("b t s d"),
        *,
        b: Dim = Each(),
        t: Dim = Each(),
        p: Dim = Each(),
    ) -> None: ...

    return f


def lookup_without_block() -> Any:
    def f(page: Ref = Prefetch("t"), x: Ref = In("p:page[t] s d"), y: Ref = Out("t s d"), *, t: Dim = Each()) -> None: ...

    return f


def lookup_by_no_grid_dim() -> Any:
    def f(page: Ref = Prefetch("t"), x: Ref = In("p:page[s] s d"), y: Ref = Out("s d"), *, p: Dim = Each()) -> None: ...

    return f


def lookup_by_blocks() -> Any:
    def f(
        page: Ref = Prefetch("t"), x: Ref = In("p:page[t] s d"), y: Ref = Out("t s d"), *, t: Dim = Block(8), p: Dim = Each()
    ) -> None: ...

    return f


def lookup_and_plain() -> Any:
    def f(
        page: Ref = Prefetch("t"),
        x: Ref = In("p:page[t] d"),
        z: Ref = In("p d"),
        y: Ref = Out("t _ d"),
        *,
        t: Dim = Each(),
        p: Dim = Block(8),
    ) -> None: ...

    return f


def alias_of_nothing() -> Any:
    def f(x: Ref = In("r d"), y: Ref = Out("r d", alias="z")) -> None: ...

    return f


def alias_of_other_dims() -> Any:
    def f(x: Ref = In("r d"), w: Ref = In("_ d"), y: Ref = Out("r d", alias="w")) -> None: ...

    return f


def span_argument() -> Any:
    def f(
        x: Ref = In("i j"),
        y: Ref = Out("i _", init=0.0),
        *,
        causal: bool = True,
        i: Dim = Block(128),
        j: Dim = Block(128, span=lambda i, casual: None),
    ) -> None: ...

    return f


def span_of_output() -> Any:
    def f(
        x: Ref = In("i j"), y: Ref = Out("i j"), *, i: Dim = Block(128), j: Dim = Block(128, span=lambda i: None)
    ) -> None: ...

    return f


DECLARATIONS = {
    misspelt_dim: (
        "f[signature]: dim 'row' of y \"row d\" is on no input and no static argument; expected one of ['d', "
        "'rows']. Did you mean 'rows'."
    ),
    misspelt_block: (
        "f[signature]: 'row' has a Block but no operand has that dim; expected one of ['d', 'rows']. Did you mean 'rows'."
    ),
    no_spec: (
        "f[signature]: parameter y says neither In, Out, Acc, Scratch, Prefetch nor Scalar; expected one of them "
        "as its default."
    ),
    block_before_star: (
        "f[signature]: parameter r is a Block before the '*'; expected it among the keyword-only parameters, after the '*'."
    ),
    each_before_star: (
        "f[signature]: parameter r is an Each before the '*'; expected it among the keyword-only parameters, after the '*'."
    ),
    grid_order: (
        "f[signature]: output y \"m n\" lacks 'k', which is outside 'n' in the grid ('k', 'm', 'n'); expected dims "
        "that an output lacks to be innermost, since its blocks must be revisited in a row. Put k after n, or "
        "write partial results with k as an axis."
    ),
    bad_token: "f[signature]: cannot read '-' in dims 'r d-1'; expected names, (a b), *a, _, 1, k/128, a:table[i].",
    bad_group: ("f[signature]: cannot read '(a 2b)' in dims 'r (a 2b)'; expected names, (a b), *a, _, 1, k/128, a:table[i]."),
    bad_lookup: (
        "f[signature]: cannot read 'p:page[0]' in dims 'r p:page[0]'; expected names, (a b), *a, _, 1, k/128, a:table[i]."
    ),
    star_not_first: "f[signature]: x \"r *d\" has '*' after the first axis; expected '*' on the first axis only.",
    two_stars: (
        "f[signature]: the dims ['r', 's'] all have '*'; expected '*' on one dim only, since a call has one set "
        "of leading axes."
    ),
    one_axis: (
        "f[signature]: y \"r\" leaves a block of 1 axes; expected two or more. Write '_' for an axis of size one: "
        "before the last dim for a row (compact; XLA copies it if the array has rank > 1), after it for a column "
        "(any block of 8, 128 x the bytes)."
    ),
    no_output: "f[signature]: there is no Out among the parameters; expected one or more.",
    reserved_name: "f[signature]: a parameter is called 'order', a keyword of every call; expected another name.",
    reserved_block: "f[signature]: a parameter is called 'block_r', a keyword of every call; expected another name.",
    unknown_dtype: (
        "f[signature]: x has dtype 'f32'; expected one of ['bool', 'int4', 'uint4', 'int8', 'uint8', "
        "'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz', 'float8_e4m3b11fnuz', 'bfloat16', "
        "'float16', 'int16', 'uint16', 'float32', 'int32', 'uint32', 'float64', 'int64', 'uint64']. Did you mean "
        "'float32'."
    ),
    misspelt_dtype: (
        "f[signature]: y has dtype 'float3'; expected one of ['bool', 'int4', 'uint4', 'int8', 'uint8', "
        "'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz', 'float8_e4m3b11fnuz', 'bfloat16', "
        "'float16', 'int16', 'uint16', 'float32', 'int32', 'uint32', 'float64', 'int64', 'uint64']. Did you mean "
        "'float32'."
    ),
    float_table: "f[signature]: table t has dtype 'float32'; expected an integer type.",
    fill_of_int: "f[signature]: fill=-1e+30 of x is no int32; expected a value of its dtype.",
    init_of_int: "f[signature]: init=300 of y is no int8; expected a value of its dtype.",
    empty_block: "f[signature]: Block of 'r' has choices []; expected one or more positive sizes.",
    odd_default: "f[signature]: Block of 'r' has default 32; expected one of [8, 16].",
    empty_choice: "f[signature]: Choice 'how' has no values; expected one or more.",
    odd_choice: "f[signature]: Choice 'how' has default 'c'; expected one of ['a', 'b'].",
    unsolvable_group: (
        "f[signature]: the size of 'a' in x \"r (a b)\" cannot be told; expected every dim but one of a group to "
        "be an axis of its own of an input, or a static int."
    ),
    unsolvable_per: (
        "f[signature]: the size of 'k' in x \"r k/128\" cannot be told; expected an axis k of an input, or a static int."
    ),
    group_not_each: (
        "f[signature]: 'a' of (a b) in x \"r (a b)\" is not walked by Each; expected Each for all dims of a group "
        "but the last, or no grid dim in it."
    ),
    misspelt_table: (
        "f[signature]: x \"p:pages[t] s d\" looks up in 'pages'; expected one of the Prefetch tables ['page']. Did "
        "you mean 'page'."
    ),
    table_rank: ('f[signature]: x "p:page[t] s d" looks up page with 1 indices; expected 2, one for each axis of page "b t".'),
    lookup_without_block: (
        "f[signature]: 'p' of x \"p:page[t] s d\" has neither Block nor Each; expected one of them, to say how "
        "much a table entry stands for."
    ),
    lookup_by_no_grid_dim: "f[signature]: 's' in p:page[s] of x \"p:page[s] s d\" is no grid dim; expected one of [].",
    lookup_by_blocks: (
        'f[signature]: p:page[t] of x "p:page[t] s d" takes the index of a block of \'t\', but page "t" has an '
        "entry for each t; expected an Each, or t/<block> in the table's dims."
    ),
    lookup_and_plain: (
        "f[signature]: 'p' is looked up in a table on one operand and plain on z \"p d\"; expected a table on "
        "every operand, since a looked-up dim has no grid index."
    ),
    alias_of_nothing: "f[signature]: output y \"r d\" is written over 'z'; expected an In, one of ['x'].",
    alias_of_other_dims: 'f[signature]: output y "r d" is written over w "_ d"; expected the same dims and dtype.',
    span_argument: "f[signature]: the span of 'j' wants 'casual'; expected one of ['i', 'causal']. Did you mean 'causal'.",
    span_of_output: (
        "f[signature]: output y \"i j\" names 'j', which has a span; expected spans on summed dims only, since "
        "steps outside of a span write nothing."
    ),
}


@pytest.mark.parametrize("make", DECLARATIONS, ids=lambda make: make.__name__)
def test_declaration(make: Callable[[], Any]) -> None:
    with pytest.raises(SignatureError) as caught:
        kernel(make())
    assert str(caught.value) == DECLARATIONS[make]


def test_operand_and_grid_dim_of_one_name_are_refused_by_python() -> None:
    with pytest.raises(SyntaxError, match="duplicate argument 'k' in function definition"):
        compile("def f(k=1, *, k=2): ...", "f", "exec")


# Calls


@kernel
def matmul(
    x: Ref = In("*m k"),
    w: Ref = In("k n"),
    b: Ref = In("_ n"),
    y: Ref = Out("*m n"),
    acc: Ref = Acc("m n"),
    *,
    act: Callable[[jax.Array], jax.Array] = jax.nn.relu,
    m: Dim = Block(128, 256),
    n: Dim = Block(128, 256),
    k: Dim = Block(128, 256),
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        y[...] = act(acc[...] + b[...].astype(F32)).astype(y.dtype)


@kernel
def rms_norm(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, eps: float = 1e-6, r: Dim = Block(8, 32)) -> None:
    y[...] = x[...]


@kernel
def swiglu(gate: Ref = In("*r f"), up: Ref = In("*r f"), y: Ref = Out("*r f"), *, r: Dim = Block(8)) -> None:
    y[...] = gate[...] * up[...]


@kernel
def flash(
    q: Ref = In("b (hk g) i d"),
    k: Ref = In("b hk i d"),
    o: Ref = Out("b (hk g) i d"),
    *,
    b: Dim = Each(),
    hk: Dim = Each(),
    g: Dim = Each(),
    i: Dim = Block(128, 256),
) -> None:
    o[...] = q[...] + k[...]


@kernel
def regrouped(x: Ref = In("r (a b)"), s: Ref = In("a b"), y: Ref = Out("r (a b)")) -> None:
    y[...] = x[...]


@kernel
def cross_entropy(
    x: Ref = In("n v"), label: Ref = In("n _", "int32"), y: Ref = Out("n _", "float32"), *, n: Dim = Block(8)
) -> None:
    y[...] = x[...]


@kernel
def scaled(x: Ref = In("r 128"), s: Ref = Scalar("float32"), y: Ref = Out("r 128"), *, times: int, r: Dim = Block(8)) -> None:
    y[...] = x[...]


@kernel
def quantized(
    x: Ref = In("m k"), s: Ref = In("k/128 m"), y: Ref = Out("m k"), *, k: Dim = Block(64, 128, 256), m: Dim = Block(128)
) -> None:
    y[...] = x[...]


@kernel
def f(x: Ref = In("b s h d"), y: Ref = Out("b s h d"), *, b: Dim = Each(), s: Dim = Block(8), h: Dim = Each()) -> None:
    y[...] = x[...]


@kernel
def grouped_blocks(
    x: Ref = In("r (e f)"),
    s: Ref = In("e _ f"),
    y: Ref = Out("r (e f)"),
    *,
    r: Dim = Block(8),
    e: Dim = Each(),
    f: Dim = Block(128, 256),
) -> None:
    y[...] = x[...] * s[...]


@kernel
def paged(
    page: Ref = Prefetch("t/8"),
    x: Ref = In("p:page[t] d"),
    z: Ref = In("t d"),
    y: Ref = Out("t d"),
    *,
    t: Dim = Block(8, 16),
    p: Dim = Block(8),
) -> None:
    y[...] = x[...]


@kernel
def tuned(x: Ref = In("r d"), y: Ref = Out("r d"), *, how: str = Choice("double", "triple"), r: Dim = Block(8)) -> None:
    y[...] = x[...]


@kernel(reject=lambda config, signature, target: "rows of 32 are slow" if config["block_r"] == 32 else None)
def choosy(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8, 32)) -> None:
    y[...] = x[...]


@kernel
def row(x: Ref = In("_ r"), y: Ref = Out("_ r"), *, r: Dim = Block(8, 128)) -> None:
    y[...] = x[...]


@kernel
def activated(x: Ref = In("r d"), y: Ref = Out("r d"), *, act: Literal["relu", "gelu"] = "relu", r: Dim = Block(8)) -> None:
    y[...] = x[...]


@kernel
def all_integer(x: Ref = In("r d", "int32"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None:
    y[...] = x[...]


X, W, B = spec(16, 16), spec(16, 8), spec(8)
CALLS: dict[str, tuple[Kernel, tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "dim_conflict": (
        matmul,
        (X, spec(17, 8), B),
        {},
        SignatureError,
        'matmul[signature]: dim \'k\' is 17 on w "k n" but 16 on x "*m k"; expected one size.',
    ),
    "rank": (
        matmul,
        (X, W, spec(1, 8)),
        {},
        SignatureError,
        'matmul[signature]: b has shape (1, 8), rank 2; expected "_ n", rank 1.',
    ),
    "rank_of_star": (
        swiglu,
        (spec(), X),
        {},
        SignatureError,
        'swiglu[signature]: gate has shape (), rank 0; expected "*r f", rank 1 or more.',
    ),
    "rank_of_scalar": (
        scaled,
        (spec(8, 128), spec(1)),
        {"times": 1},
        SignatureError,
        "scaled[signature]: s has shape (1,), rank 1; expected a scalar, rank 0.",
    ),
    "dtype_mix": (
        matmul,
        (X, spec(16, 8, dtype="bfloat16"), B),
        {},
        SignatureError,
        (
            "matmul[signature]: w has dtype bfloat16 but x has float32; expected one element type. Cast one, or give "
            "w a dtype of its own."
        ),
    ),
    "dtype_fixed": (
        cross_entropy,
        (X, spec(16)),
        {},
        SignatureError,
        "cross_entropy[signature]: label has dtype float32; expected int32.",
    ),
    "dtype_unsupported": (
        swiglu,
        (spec(8, 8, dtype="float16"), X),
        {},
        SignatureError,
        "swiglu[signature]: gate has dtype float16; expected one of ['bfloat16', 'float32'].",
    ),
    "dtype_of_output": (
        all_integer,
        (spec(8, 8, dtype="int32"),),
        {},
        SignatureError,
        ('all_integer[signature]: output y "r d" has no dtype and no input shares one; expected a dtype of its own.'),
    ),
    "count": (
        matmul,
        (X, W),
        {},
        SignatureError,
        'matmul[signature]: 2 arrays; expected 3: x "*m k", w "k n", b "_ n".',
    ),
    "no_array": (matmul, (X, [1], B), {}, SignatureError, "matmul[signature]: w is a list; expected an array."),
    "group_multiple": (
        flash,
        (spec(1, 5, 8, 8), spec(1, 2, 8, 8)),
        {},
        SignatureError,
        "flash[signature]: axis (hk g) of q has size 5; expected a multiple of 2.",
    ),
    "group_product": (
        regrouped,
        (spec(8, 7), spec(2, 3)),
        {},
        SignatureError,
        "regrouped[signature]: axis (a b) of x has size 7; expected 6, a (2) x b (3).",
    ),
    "exact": (
        scaled,
        (spec(8, 64), spec()),
        {"times": 1},
        SignatureError,
        "scaled[signature]: axis 128 of x has size 64; expected exactly 128.",
    ),
    "per": (
        quantized,
        (spec(128, 300), spec(2, 128)),
        {},
        SignatureError,
        "quantized[signature]: axis k/128 of s has size 2; expected 3, since k is 300.",
    ),
    "leading": (
        swiglu,
        (spec(2, 3, 8), spec(3, 2, 8)),
        {},
        SignatureError,
        'swiglu[signature]: leading axes (3, 2) of up "*r f"; expected (2, 3) as in the other operands.',
    ),
    "zero_k": (
        matmul,
        (spec(16, 0), spec(0, 8), B),
        {},
        SignatureError,
        (
            "matmul[signature]: 'k' is 0 and output y is not empty; expected the reference to be called. Zero-size "
            "reductions never reach the kernel."
        ),
    ),
    "unknown_block": (
        matmul,
        (X, W, B),
        {"block_mm": 8},
        ConfigError,
        (
            "matmul[config]: no keyword 'block_mm'; expected one of ['act', 'block_m', 'block_n', 'block_k']. Did "
            "you mean 'block_m'."
        ),
    ),
    "misspelt_static": (
        rms_norm,
        (X,),
        {"epz": 1.0},
        ConfigError,
        "rms_norm[config]: no keyword 'epz'; expected one of ['eps', 'block_r']. Did you mean 'eps'.",
    ),
    "static_of_literals": (
        activated,
        (X,),
        {"act": "rely"},
        ConfigError,
        "activated[config]: act = 'rely'; expected one of ['relu', 'gelu']. Did you mean 'relu'.",
    ),
    "missing_static": (
        scaled,
        (spec(8, 128), spec()),
        {},
        ConfigError,
        "scaled[config]: no value for 'times'; expected one, since it has no default.",
    ),
    "unhashable_static": (
        rms_norm,
        (X,),
        {"eps": [1]},
        ConfigError,
        (
            "rms_norm[config]: static argument 'eps' is a list, which has no hash; expected a value that can be a "
            "dictionary key."
        ),
    ),
    "block_not_8": (
        rms_norm,
        (X,),
        {"block_r": 12},
        ConfigError,
        "rms_norm[config]: block_r = 12; expected a multiple of 8, or at least the size of the dim.",
    ),
    "block_not_int": (
        rms_norm,
        (X,),
        {"block_r": "8"},
        ConfigError,
        "rms_norm[config]: block_r = '8'; expected a positive int.",
    ),
    "block_negative": (
        rms_norm,
        (X,),
        {"block_r": -8},
        ConfigError,
        "rms_norm[config]: block_r = -8; expected a positive int.",
    ),
    "choice": (
        tuned,
        (X,),
        {"how": "twice"},
        ConfigError,
        "tuned[config]: how = 'twice'; expected one of ['double', 'triple'].",
    ),
    "reject": (
        choosy,
        (spec(64, 128),),
        {"block_r": 32},
        ConfigError,
        "choosy[config]: config block_r=32 is rejected: rows of 32 are slow; expected another config.",
    ),
    "order_unknown": (
        matmul,
        (X, W, B),
        {"order": "m n kk"},
        ConfigError,
        "matmul[config]: order 'm n kk'; expected each of ['m', 'n', 'k'] once. Did you mean 'k'.",
    ),
    "order_short": (
        matmul,
        (X, W, B),
        {"order": "m n"},
        ConfigError,
        "matmul[config]: order 'm n'; expected each of ['m', 'n', 'k'] once.",
    ),
    "order_type": (
        matmul,
        (X, W, B),
        {"order": 3},
        ConfigError,
        "matmul[config]: order = 3; expected a string of the dims ['m', 'n', 'k'].",
    ),
    "order_illegal": (
        matmul,
        (X, W, B),
        {"order": "k m n"},
        ConfigError,
        (
            "matmul[config]: output y \"*m n\" lacks 'k', which is outside 'n' in the grid ('k', 'm', 'n'); expected "
            "dims that an output lacks to be innermost, since its blocks must be revisited in a row. Put k after n, "
            "or write partial results with k as an axis."
        ),
    ),
    "tiling_sublanes": (
        f,
        (spec(2, 16, 4, 128),),
        {},
        LowerError,
        (
            'f[lower]: x "b s h d" is blocked (1, 8, 1, 128) of (2, 16, 4, 128): 1 on its second-to-last axis h; '
            "expected a multiple of 8 or all 4. Make that dim whole, or move it left."
        ),
    ),
    "tiling_lanes": (
        row,
        (spec(256),),
        {"block_r": 8},
        LowerError,
        (
            'row[lower]: x "_ r" is blocked (1, 8) of (1, 256): 8 on its last axis r; expected a multiple of 128 or '
            "all 256. Make that dim whole, or move it left."
        ),
    ),
    "group_block": (
        grouped_blocks,
        (spec(8, 3 * 384), spec(3, 384)),
        {"block_f": 256},
        ConfigError,
        "grouped_blocks[config]: block_f = 256; expected a divisor of f (384), the last dim of (e f) in x.",
    ),
    "per_block": (
        quantized,
        (spec(256, 512), spec(4, 256)),
        {"block_k": 64},
        ConfigError,
        ('quantized[config]: block_k = 64; expected a multiple of 128, since s "k/128 m" has one entry for each 128 of k.'),
    ),
    "table_block": (
        paged,
        (spec(3, dtype="int32"), spec(64, 128), spec(24, 128)),
        {"block_t": 16},
        ConfigError,
        'paged[config]: block_t = 16; expected 8, since page "t/8" has an entry for each 8 of t.',
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_call(case: str) -> None:
    called, arrays, keywords, error, message = CALLS[case]
    with pytest.raises(error) as caught:
        called.bind(*arrays, **keywords)
    assert type(caught.value) is error
    assert str(caught.value) == message
