"""The Helion frontend: what a Helion function becomes, on the way to the chip and back, and what is said when it cannot.

What is asked of every kernel is asked of Helion's in `test_kernels_helion`; here is what only this frontend has.
"""

import importlib.metadata
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpukern
from tpukern import helion_adapter, lowering
from tpukern.dsl import Config, Kernel, Workload, from_helion_config, to_helion_config, using
from tpukern.errors import ConfigError, LowerError, SignatureError

helion = pytest.importorskip("helion")
import helion.language as hl  # noqa: E402 (after the skip)


def matmul_body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m, k = x.size()
    k2, n = y.size()
    assert k == k2
    out = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for tile_m, tile_n in hl.tile([m, n]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.addmm(acc, x[tile_m, tile_k], y[tile_k, tile_n])
        out[tile_m, tile_n] = acc
    return out


def scaled_body(x: torch.Tensor, w: torch.Tensor, factor: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    r, d = x.size()
    y = torch.empty_like(x)
    total = torch.zeros([d], dtype=torch.float32, device=x.device)
    for tile_r in hl.tile(r):
        v = x[tile_r, :].to(torch.float32) * w[:].to(torch.float32) * factor
        y[tile_r, :] = v.to(x.dtype)
        hl.atomic_add(total, [slice(None)], torch.sum(v, dim=0))
    return y, total.to(x.dtype)


@pytest.fixture(scope="module")
def matmul() -> Kernel:
    return tpukern.kernel(name="matmul")(helion.kernel(matmul_body))


@pytest.fixture(scope="module")
def scaled() -> Kernel:
    return tpukern.kernel(name="scaled")(scaled_body)


def test_a_bare_function_declares_itself(matmul: Kernel, scaled: Kernel) -> None:
    assert (matmul.frontend, scaled.frontend) == ("helion", "helion")
    assert [str(o) for o in matmul.declaration.operands] == ['x "m k"', 'y "k n"', 'out "m n"']
    assert matmul.declaration.grid == ("m", "n")
    assert [str(o) for o in scaled.declaration.operands] == ['x "r d"', 'w "d"', 'y "r d"', 'total "d"']
    assert dict(scaled.declaration.statics) == {"factor": 2.0}


def test_ragged_sums_do_not_read_what_is_not_there(scaled: Kernel) -> None:
    """37 rows in blocks of 8: interpret form has NaN past the end, and Helion masks by multiplying with 0."""
    x = np.random.default_rng(0).standard_normal((37, 40)).astype(np.float32)
    y, total = scaled(jnp.asarray(x), jnp.ones(40, jnp.float32), 3.0, block_r=8)
    np.testing.assert_allclose(y, 3 * x, rtol=1e-6)
    np.testing.assert_allclose(total, 3 * x.sum(0), rtol=1e-5, atol=1e-5)


def test_configs_pass_through_both_ways(matmul: Kernel) -> None:
    signature = matmul.workload_signature(Workload("case", m=300, k=500, n=200))
    config = matmul.default_config(signature, "v5e")
    assert config["block_k"] == 128
    assert config["loop_orders_0"] == "[0 1]"
    theirs = to_helion_config(matmul, config)
    assert type(theirs) is helion.Config
    assert theirs.block_sizes == [config["block_m"], config["block_n"], config["block_k"]]
    assert from_helion_config(matmul, theirs) == config == Config.parse(str(config))
    mine = helion.Config(block_sizes=[16, 128, 128], my_knob="fast", loop_orders=[[1, 0]], pallas_loop_type="unroll")
    assert to_helion_config(matmul, from_helion_config(matmul, mine)) == mine
    kinds = {c["pallas_loop_type"] for c in matmul.configs(signature, "v5e")}
    assert kinds == {"emit_pipeline", "fori_loop", "unroll"}


def test_helions_short_names_are_read(scaled: Kernel) -> None:
    scaled.default_config(scaled.workload_signature(Workload("case", r=64, d=128)), "v5e")
    assert from_helion_config(scaled, {"block_size": 8}) == from_helion_config(scaled, {"block_sizes": [8]})
    assert dict(from_helion_config(scaled, {"block_size": 8})) == {"block_r": 8}


def test_products_of_float32_in_full() -> None:
    """Helion's own backend takes DEFAULT whatever its setting says; HIGHEST with bfloat16 does not compile."""
    exact = tpukern.kernel(name="exact", settings={"dot_precision": "ieee"})(matmul_body)
    for dtype, said in (("float32", "highest"), ("bfloat16", "default")):
        signature = exact.workload_signature(Workload("case", dtype=dtype, m=256, k=256, n=256))
        source = exact.helion.source(signature, exact.default_config(signature, "v5e"), None)  # type: ignore[union-attr]
        assert f"precision='{said}'" in source


def test_one_kernel_for_every_road(matmul: Kernel) -> None:
    """Mosaic for a chip, and the same code in interpret form, in either order and twice: no tracer is left behind."""
    specs = (jax.ShapeDtypeStruct((300, 500), jnp.bfloat16), jax.ShapeDtypeStruct((500, 200), jnp.bfloat16))
    bound = matmul.bind(*specs, target="v5e")
    first = lowering.lower(bound)
    a, b = (jnp.asarray(np.random.default_rng(n).standard_normal(s.shape), jnp.bfloat16) for n, s in enumerate(specs))
    with using(interpret=True):
        out = jax.jit(lambda x, y: matmul(x, y))(a, b)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=0.3)
    assert lowering.lower(bound).digest == first.digest
    assert len(first.mosaic) == 1
    (call,) = bound.calls
    assert call.grid == (19, 2)
    assert "_helion_matmul" in matmul.helion.source(bound.signature, bound.config, None)  # type: ignore[union-attr]


def test_a_version_that_was_not_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, said in (("1.4.0", "helion 1.4.0"), (None, "helion is not installed")):
        monkeypatch.setattr(helion_adapter, "installed", lambda found=found: found)
        helion_adapter.load.cache_clear()
        with pytest.raises(ConfigError) as error:
            helion_adapter.load()
        assert str(error.value) == (
            f"helion[config]: {said}; expected helion 1.5.1, which was tested. pip install 'tpukern[helion]'"
        )
    helion_adapter.load.cache_clear()


def test_private_names_are_there() -> None:
    """Fails with the names that a new Helion lacks."""
    assert importlib.metadata.version("helion") in helion_adapter.TESTED
    assert [name for name, check in helion_adapter.private_names().items() if not check()] == []


def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from helion.runtime.pallas import launcher

    monkeypatch.delattr(launcher, "_pallas_prepare_args")
    helion_adapter.load.cache_clear()
    with pytest.raises(ConfigError) as error:
        helion_adapter.load()
    assert str(error.value) == (
        "helion[config]: helion 1.5.1 has no helion.runtime.pallas.launcher._pallas_prepare_args; expected the private names "
        "of helion 1.5.1. pip install 'tpukern[helion]'"
    )
    helion_adapter.load.cache_clear()


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if text in line)


def transposed_body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m, _k = x.size()
    n, _j = y.size()
    out = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for tile_m, tile_n in hl.tile([m, n]):
        out[tile_m, tile_n] = torch.matmul(x[tile_m, :], y[tile_n, :])
    return out


def test_errors_name_the_users_line() -> None:
    with pytest.raises(LowerError) as error:
        tpukern.kernel(name="transposed", frontend="helion")(transposed_body)
    assert str(error.value).startswith("transposed[lower]: Helion's Pallas backend cannot express it: ")
    assert f"at {__file__}:{line_of(transposed_body, 'torch.matmul')}; expected a function that it can." in str(error.value)
    assert type(error.value.__cause__).__module__ == "helion.exc"


def rankless_body(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.numel()):
        out[tile] = out[tile]
    return out


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (
            lambda: tpukern.kernel(name="k", signature="x r d")(matmul_body),
            "k[signature]: cannot read 'x r d' in its signature; expected "
            '"x: r d, w: d, i: r int32 -> y: r d, lse: r float32 saved".',
        ),
        (
            lambda: tpukern.kernel(name="k", signature="z: r d")(matmul_body),
            "k[signature]: its signature names 'z'; expected parameters of the function, ['x', 'y'].",
        ),
        (
            lambda: tpukern.kernel(name="k")(rankless_body),
            "k[signature]: the function does not tell the rank of x; expected sizes taken from it (m, n = x.size()), or "
            'signature="x: r d, ...".',
        ),
        (
            lambda: tpukern.kernel(name="k", frontend="triton")(matmul_body),
            "k[signature]: frontend 'triton'; expected 'pallas' or 'helion'.",
        ),
    ],
)
def test_declarations_that_cannot_be_read(declare: Any, said: str) -> None:
    with pytest.raises(SignatureError) as error:
        declare()
    assert str(error.value) == said


def test_a_config_that_helion_refuses(matmul: Kernel) -> None:
    signature = matmul.workload_signature(Workload("case", m=300, k=500, n=200))
    with pytest.raises(ConfigError) as error:
        matmul.bind_signature(signature, Config({"block_j": 8}), "v5e")
    assert "matmul[config]: no keyword 'block_j'; expected one of ['block_m', 'block_n', 'block_k'" in str(error.value)
    with pytest.raises(ConfigError) as error:
        matmul.bind_signature(signature, Config({"pallas_loop_type": "sideways"}), "v5e")
    assert str(error.value) == (
        "matmul[config]: pallas_loop_type = 'sideways'; expected one of ['emit_pipeline', 'unroll', 'fori_loop']."
    )
    with pytest.raises(ConfigError, match="Helion refuses the config: ") as error:
        matmul.bind_signature(signature, Config({"block_m": 33}), "v5e")
    assert type(error.value.__cause__).__name__ == "InvalidConfig"
