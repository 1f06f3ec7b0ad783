"""Signatures, configs, workloads and bound kernels: what the later stages read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukern.dsl import (
    F32,
    NEG,
    Acc,
    Block,
    Choice,
    Config,
    Dim,
    Each,
    In,
    Out,
    Override,
    Prefetch,
    Ref,
    Scratch,
    Workload,
    declared,
    kernel,
    using,
)
from tpukern.errors import ConfigError, LowerError
from tpukern.targets import TARGETS, Target


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@kernel(
    op="dsl_configs::matmul",
    workloads=[
        Workload("square", m=1024, k=1024, n=1024, source="somewhere"),
        Workload("batched", dtype="float32", m=(2, 512), k=128, n=128, act="gelu", directions=("forward",)),
    ],
    tolerance=4,
)
def matmul(
    x: Ref = In("*m k"),
    w: Ref = In("k n"),
    y: Ref = Out("*m n"),
    acc: Ref = Acc("m n"),
    *,
    act: str = "none",
    unroll: bool = Choice(False, True),
    m: Dim = Block(128, 256, 512, 1024, default=512),
    n: Dim = Block(128, 256, 512, 1024, default=512),
    k: Dim = Block(128, 512, 2048, default=512),
) -> None:
    """Multiplies."""


def test_what_a_kernel_says_of_itself() -> None:
    assert (matmul.name, matmul.op, matmul.frontend, matmul.doc) == ("matmul", "dsl_configs::matmul", "pallas", "Multiplies.")
    assert (matmul.dtypes, matmul.tolerance, matmul.overrides) == (("bfloat16", "float32"), 4, ())
    assert [w.name for w in matmul.workloads] == ["square", "batched"]
    assert matmul.directions == {"forward": matmul}
    assert matmul in declared.kernels()
    assert repr(matmul) == "<Kernel matmul>"
    assert matmul.declaration.grid == ("m", "n", "k")
    assert matmul.declaration.keys == ("block_m", "block_n", "block_k", "unroll")
    assert dict(matmul.declaration.static_types) == {"act": str}


def test_a_kernel_may_have_another_name_than_its_function() -> None:
    @kernel(name="copy")
    def body(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None:
        y[...] = x[...]

    assert body.name == "copy"
    assert body.bind(spec(8, 128)).calls[0].name == "copy"


def test_listeners_hear_of_kernels_declared_before_and_after() -> None:
    heard: list[str] = []
    declared.listen(lambda k: heard.append(k.name))
    assert "matmul" in heard

    @kernel(op="dsl_configs::later")
    def later(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None: ...

    @later.backward
    def later_backward(dy: Any) -> dict[str, Any]:
        return {"dx": dy}

    @kernel
    def without_op(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None: ...

    assert heard[-2:] == ["later", "later"]


# Signatures


def test_signature() -> None:
    signature = matmul.signature(spec(2, 3, 64), spec(64, 32), act="relu")
    assert str(signature) == "matmul(x: float32[2,3,64], w: float32[64,32], act='relu') -> y: float32[2,3,32]"
    assert dict(signature.sizes) == {"m": 6, "k": 64, "n": 32}
    assert (signature.leading, signature.dtype, dict(signature.statics)) == ((2, 3), "float32", {"act": "relu"})
    assert signature == matmul.signature(spec(2, 3, 64), spec(64, 32), act="relu")
    assert hash(signature) == hash(matmul.signature(spec(2, 3, 64), spec(64, 32), act="relu"))
    assert signature != matmul.signature(spec(6, 64), spec(64, 32), act="relu")


@pytest.mark.parametrize("like", ["jax", "numpy", "torch"])
def test_signature_of_other_arrays(like: str) -> None:
    if like == "torch":
        torch = pytest.importorskip("torch")
        arrays: list[Any] = [torch.zeros(4, 8), torch.zeros(8, 16)]
    else:
        arrays = [np.zeros((4, 8), np.float32), np.zeros((8, 16), np.float32)]
        arrays = [jnp.asarray(a) for a in arrays] if like == "jax" else arrays
    assert matmul.signature(*arrays) == matmul.signature(spec(4, 8), spec(8, 16))


def test_workload_signature() -> None:
    square, batched = (matmul.workload_signature(w) for w in matmul.workloads)
    assert str(square) == "matmul(x: bfloat16[1024,1024], w: bfloat16[1024,1024], act='none') -> y: bfloat16[1024,1024]"
    assert str(batched) == "matmul(x: float32[2,512,128], w: float32[128,128], act='gelu') -> y: float32[2,512,128]"


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload("w", m=8, n=8), "matmul, workload w[config]: no size for 'k'; expected one for each of ['m', 'k', 'n']."),
        (
            Workload("w", m=8, n=8, k=8, acts="relu"),
            "matmul, workload w[config]: no dim or static argument 'acts'; expected one of ['m', 'k', 'n', 'act']. "
            "Did you mean 'act'.",
        ),
        (Workload("w", m=8, n=-8, k=8), "matmul, workload w[config]: n = -8; expected a size of 0 or more."),
    ],
    ids=["missing", "unknown", "negative"],
)
def test_workload_errors(workload: Workload, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        matmul.workload_signature(workload)
    assert str(caught.value) == message


def test_workload_of_groups_and_fixed_dtypes() -> None:
    @kernel
    def heads(
        q: Ref = In("b (hk g) i d"),
        k: Ref = In("b hk i d"),
        label: Ref = In("b _ i", "int32"),
        o: Ref = Out("b (hk g) i d"),
        *,
        b: Dim = Each(),
        hk: Dim = Each(),
        g: Dim = Each(),
        i: Dim = Block(128),
    ) -> None: ...

    signature = heads.workload_signature(Workload("w", b=2, hk=3, g=4, i=5, d=6))
    assert [str(o) for o in signature.inputs] == ["q: bfloat16[2,12,5,6]", "k: bfloat16[2,3,5,6]", "label: int32[2,5]"]


def test_overrides_and_workloads_are_values() -> None:
    override = Override("aten::mm", impl=lambda a, b: a)
    assert (override.cond, override.keys, override.opt_in, override.flips_with) == (None, ("PrivateUse1",), False, ())
    assert Workload("w", m=1) == Workload("w", m=1)
    assert hash(Workload("w", m=1, tables={"t": [1]})) == hash(Workload("w", m=1))
    assert Workload("w", m=1) != Workload("w", m=2)


# Configs


@pytest.mark.parametrize("text", ["block_m=512,order=m n k", "a.block_i=8,how=fast,on=True,x=0.5,none=None", ""])
def test_config_text_round_trips(text: str) -> None:
    assert str(Config.parse(text)) == text


def test_config_values() -> None:
    config = Config.parse(" block_m = 512 , on=False,how=fast ")
    assert dict(config) == {"block_m": 512, "on": False, "how": "fast"}
    assert config == Config({"how": "fast", "on": False, "block_m": 512})
    assert hash(config) == hash(Config({"how": "fast", "on": False, "block_m": 512}))
    assert config.prefixed("f") == {"f.block_m": 512, "f.on": False, "f.how": "fast"}
    assert config.prefixed("f").within("f") == config
    assert not config.prefixed("f").within("ff")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block_m", "config[config]: 'block_m' in 'block_m'; expected key=value, separated by commas."),
        ("block_m=", "config[config]: 'block_m=' in 'block_m='; expected key=value, separated by commas."),
        ("a=1,a=2", "config[config]: 'a' twice in 'a=1,a=2'; expected each key once."),
    ],
)
def test_config_text_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.parse(text)
    assert str(caught.value) == message


def test_configs_that_are_equal_after_clamping_are_one() -> None:
    found = matmul.configs(matmul.signature(spec(100, 300), spec(300, 1024)))
    assert len(found) == len(set(found)) == 1 * 4 * 2 * 2
    assert {config["block_m"] for config in found} == {128}
    assert {config["block_k"] for config in found} == {128, 512}
    bound = [matmul.bind(spec(100, 300), spec(300, 1024), block_m=m).config for m in (128, 512, 1024, 4096)]
    assert len(set(bound)) == 1


def test_block_beyond_all_choices_covers_the_dim() -> None:
    assert matmul.bind(spec(3000, 300), spec(300, 128), block_m=4096).config["block_m"] == 3000


def test_order_that_moves_only_dims_of_one_step_is_none() -> None:
    arrays = spec(2048, 128), spec(128, 128)
    assert "order" not in matmul.bind(*arrays, order="n m k").config
    assert matmul.bind(spec(2048, 128), spec(128, 2048), order="n  m k").config["order"] == "n m k"


def test_choices_are_found_by_value_or_by_text() -> None:
    arrays = spec(8, 128), spec(128, 128)
    assert matmul.bind(*arrays, unroll=True).config["unroll"] is True
    assert matmul.bind(*arrays, config=Config({"unroll": "True"})).config["unroll"] is True


def test_keywords_win_over_config() -> None:
    bound = matmul.bind(spec(2048, 128), spec(128, 2048), config=Config.parse("block_m=128,block_n=128"), block_m=256)
    assert (bound.config["block_m"], bound.config["block_n"]) == (256, 128)


def test_default_steps_down_until_the_estimate_fits() -> None:
    small, big = (matmul.signature(spec(n, n, dtype="float32"), spec(n, n, dtype="float32")) for n in (512, 8192))
    assert matmul.default_config(small, "v5e") == Config.parse("block_m=512,block_n=512,block_k=512,unroll=False")
    assert matmul.default_config(big) == Config.parse("block_m=512,block_n=512,block_k=512,unroll=False")

    @kernel(vmem_limit_bytes=40 * 2**20)
    def wide(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8, 64, 256, 512, default=256)) -> None: ...

    @kernel
    def usual(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8, 64, 256, 512, default=256)) -> None: ...

    signature = usual.signature(spec(4096, 8192))
    # x and y twice and one copy: 5 x 4 bytes x block x 8192 = 40 MiB at 256, 10 MiB at 64
    assert usual.default_config(signature) == {"block_r": 256}
    assert usual.default_config(signature, "v5e") == {"block_r": 64}
    assert usual.default_config(signature, TARGETS["v6e"]) == {"block_r": 64}
    assert wide.default_config(wide.signature(spec(4096, 8192)), "v5e") == {"block_r": 256}
    assert wide.default_config(wide.signature(spec(4096, 8192)), "v4") == {"block_r": 64}  # has 16 MiB in all
    assert wide.bind(spec(4096, 8192)).calls[0].vmem_limit_bytes == 40 * 2**20


def test_default_is_made_legal() -> None:
    @kernel
    def grouped(
        x: Ref = In("r (e f)"),
        s: Ref = In("e _ f"),
        y: Ref = Out("r (e f)"),
        *,
        r: Dim = Block(8),
        e: Dim = Each(),
        f: Dim = Block(128, 256, 512, default=512),
    ) -> None: ...

    assert grouped.default_config(grouped.signature(spec(8, 2 * 768), spec(2, 768)))["block_f"] == 256
    assert grouped.default_config(grouped.signature(spec(8, 2 * 640), spec(2, 640)))["block_f"] == 128
    assert grouped.largest_config(grouped.signature(spec(8, 2 * 640), spec(2, 640)))["block_f"] == 128
    with pytest.raises(ConfigError) as caught:
        grouped.default_config(grouped.signature(spec(8, 2 * 700), spec(2, 700)))
    assert str(caught.value) == ("grouped[config]: block_f = 512; expected a divisor of f (700), the last dim of (e f) in x.")
    with pytest.raises(ConfigError):
        grouped.largest_config(grouped.signature(spec(8, 2 * 700), spec(2, 700)))


def test_largest_config() -> None:
    signature = matmul.signature(spec(4096, 4096), spec(4096, 300))
    assert matmul.largest_config(signature) == Config.parse("block_m=1024,block_n=512,block_k=2048,unroll=False")


def test_reject_prunes_and_sees_the_target() -> None:
    def reject(config: Config, signature: Any, target: Target | None) -> str | None:
        return "too big for v5e" if target and target.name == "v5e" and config["block_r"] > 64 else None

    @kernel(reject=reject)
    def picky(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8, 64, 256, default=256)) -> None: ...

    signature = picky.signature(spec(512, 128))
    assert [c["block_r"] for c in picky.configs(signature)] == [8, 64, 256]
    assert [c["block_r"] for c in picky.configs(signature, "v5e")] == [8, 64]
    assert picky.default_config(signature, "v5e") == {"block_r": 64}
    with pytest.raises(ConfigError) as caught:
        picky.bind(spec(512, 128), target="v5e", block_r=256)
    assert str(caught.value) == (
        "picky[config] on v5e: config block_r=256 is rejected: too big for v5e; expected another config."
    )


def test_no_legal_config_because_of_tiles() -> None:
    @kernel
    def row(x: Ref = In("_ r"), y: Ref = Out("_ r"), *, r: Dim = Block(8, 64)) -> None: ...

    assert row.configs(row.signature(spec(256))) == ()
    with pytest.raises(LowerError):
        row.default_config(row.signature(spec(256)))


def test_unknown_target() -> None:
    with pytest.raises(ConfigError, match="no target 'v55e'"):
        matmul.default_config(matmul.signature(spec(8, 8), spec(8, 8)), "v55e")


# Bound


def test_bound_is_a_value() -> None:
    arrays = spec(100, 300), spec(300, 1024)
    bound = matmul.bind(*arrays, target="v5e", act="relu")
    assert bound == matmul.bind(*arrays, target="v5e", act="relu", block_m=4096)
    assert bound != matmul.bind(*arrays, target="v6e", act="relu")
    assert hash(bound) == hash(matmul.bind(*arrays, target="v5e", act="relu"))
    assert (bound.kernel, bound.target) == (matmul, TARGETS["v5e"])
    assert bound.signature == matmul.signature(*arrays, act="relu")
    assert bound.specs == arrays


@kernel
def looks_up(
    table: Ref = Prefetch("t"),
    x: Ref = In("p:table[t] s d"),
    y: Ref = Out("t s d"),
    kept: Ref = Scratch("t s d", "bfloat16"),
    *,
    t: Dim = Each(),
    p: Dim = Each(),
) -> None:
    y[...] = x[...]


def test_text_of_a_bound_kernel() -> None:
    bound = looks_up.bind(spec(3, dtype="int32"), spec(5, 8, 256), target="v5e")
    assert bound.text().splitlines() == [
        "looks_up(table: int32[3], x: float32[5,8,256]) -> y: float32[3,8,256]",
        "config: none",
        "sizes: t=3, p=5, s=8, d=256",
        "target: v5e, 16,777,216 bytes of VMEM for one kernel",
        "looks_up: grid (t=3 parallel)",
        "  prefetch t0: int32[3] in smem",
        "  in x: float32[5, 8, 256] block (1, 8, 256) at (t0[t], 0, 0) in 2 x vmem",
        "  out y: float32[3, 8, 256] block (1, 8, 256) at (t, 0, 0) in 2 x vmem",
        "  scratch: bfloat16[8, 256] in vmem",
        *bound.text().splitlines()[9:],
    ]
    assert bound.text().splitlines()[9].startswith("  vmem estimate: ")


def test_scratch_keeps_the_steps_that_may_share_it_in_order() -> None:
    """`kept` names t, so nothing is carried over t; `carried` names nothing."""

    @kernel
    def carries(x: Ref = In("r d"), y: Ref = Out("r d"), carried: Ref = Scratch("8 d"), *, r: Dim = Block(8)) -> None:
        y[...] = x[...]

    assert carries.bind(spec(64, 128)).calls[0].dimension_semantics == ("arbitrary",)

    @kernel
    def keeps(x: Ref = In("r d"), y: Ref = Out("r d"), kept: Ref = Scratch("r d"), *, r: Dim = Block(8)) -> None:
        y[...] = x[...]

    assert keeps.bind(spec(64, 128)).calls[0].dimension_semantics == ("parallel",)


# Context


@kernel
def top(
    x: Ref = In("r v", fill=NEG), y: Ref = Out("r _", init=NEG), *, r: Dim = Block(8, 16), v: Dim = Block(128, 256)
) -> None:
    y[...] = jnp.maximum(y[...], jnp.max(x[...], axis=1, keepdims=True))


def grid_of(**keywords: Any) -> tuple[tuple[int, ...], bool]:
    """The grid that a call in the context in force makes, and whether it is in interpret form."""
    jaxpr = jax.make_jaxpr(lambda x: top(x, **keywords))(jnp.zeros((32, 512), F32))
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    return equation.params["grid_mapping"].grid, bool(equation.params["interpret"])


def test_interpret_form_takes_the_largest_blocks_and_a_target_the_defaults() -> None:
    assert grid_of() == ((2, 2), True)
    with using(target="v5e"):
        assert grid_of() == ((4, 4), False)
        with using(interpret=True):
            assert grid_of() == ((2, 2), True)
    with using(interpret=False):
        assert grid_of() == ((4, 4), False)


def test_configs_of_the_context_and_keywords() -> None:
    with using(configs={"top": {"block_v": 128}}):
        assert grid_of() == ((2, 4), True)
        assert grid_of(block_r=8) == ((4, 4), True)
        with using(configs={"top": Config.parse("block_r=8")}):
            assert grid_of() == ((4, 2), True)
    assert grid_of() == ((2, 2), True)


def test_unknown_target_of_a_context() -> None:
    with pytest.raises(ConfigError, match="no target 'v3'"), using(target="v3"):
        pass


def test_names_of_module_and_function_do_not_get_in_each_others_way() -> None:
    from tpukern import dsl

    assert callable(dsl.kernel)
    assert callable(dsl.dot)
    assert set(dsl.__all__) <= set(dir(dsl))


def test_an_order_that_changes_what_an_accumulator_lasts_over() -> None:
    @kernel
    def rows(
        x: Ref = In("b i j"),
        y: Ref = Out("b i _"),
        acc: Ref = Acc("i _"),
        *,
        b: Dim = Each(),
        i: Dim = Block(8),
        j: Dim = Block(128),
    ) -> None:
        y[...] = x[...]

    assert rows.bind(spec(2, 16, 256), order="b i j").config == {"block_i": 8, "block_j": 128}
    with pytest.raises(ConfigError) as caught:
        rows.bind(spec(2, 16, 256), order="i b j")
    assert str(caught.value) == (
        "rows[config]: acc \"i _\" would last over b and j in the grid ('i', 'b', 'j'); expected it to last over j, as in the "
        "grid ('b', 'i', 'j') that it was written for."
    )
