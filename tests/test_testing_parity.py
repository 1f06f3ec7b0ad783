"""Whole verdicts: of right kernels, of wrong ones, and of what cannot be judged."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest

from tpukern.dsl import F32, Block, Dim, In, Kernel, Out, Ref, kernel
from tpukern.errors import ConfigError, ParityError
from tpukern.testing import PROPERTIES, Verdict, parity
from tpukern.testing.repro import kept

if TYPE_CHECKING:
    from torch import Tensor

FEW: dict[str, Any] = {"examples": 10, "shapes": 4}


def scaled_reference(x: "Tensor", w: "Tensor") -> "Tensor":
    return x * w


def scaled(body: Callable[..., None], reference: Any = scaled_reference, **options: Any) -> Kernel:
    """Returns a kernel y = x w whose body is given."""

    @kernel(reference=reference, name=body.__name__, tolerance=2, **options)
    def made(x: Ref = In("*r d"), w: Ref = In("_ d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
        body(x, w, y, r)

    return made


def right(x: Ref, w: Ref, y: Ref, r: Dim) -> None:
    y[...] = (x[...].astype(F32) * w[...].astype(F32)).astype(y.dtype)


def answers(verdict: Verdict) -> dict[tuple[str, str], int]:
    return {(r.property, r.direction): len(r.findings) for r in verdict.results}


def test_a_right_kernel() -> None:
    verdict = parity(scaled(right), **FEW)
    assert verdict.ok, verdict.findings
    assert verdict.check() is None
    assert answers(verdict) == {(name, "forward"): 0 for name, ways in PROPERTIES.items() if "forward" in ways}
    cases = {r.property: r.cases for r in verdict.results}
    assert cases["parity"] >= 10 + 2 * 4
    assert all(cases[name] for name in PROPERTIES if name in cases and name not in ("strides", "compiles"))
    skipped = {r.property: r.skipped for r in verdict.results if r.skipped}
    assert skipped == {"strides": "it has no torch op", "compiles": "no target was named"}
    assert [(w.output, w.dtype, w.bound) for w in verdict.worst] == [("y", "bfloat16", 2.0), ("y", "float32", 2.0)]
    assert all(0 < w.ulps < 1 and w.native is not None and w.native < 1 for w in verdict.worst)
    assert json.loads(json.dumps(verdict.json()))["ok"] is True


def test_the_seed_determines_everything() -> None:
    one, same, other = (parity(scaled(right), seed=seed, properties=["parity"], **FEW) for seed in (1, 1, 2))
    assert one.worst == same.worst
    assert one.worst != other.worst


def test_a_wrong_tail_is_found_and_made_small() -> None:
    def tailed(x: Ref, w: Ref, y: Ref, r: Dim) -> None:
        v = x[...].astype(F32) * w[...].astype(F32)
        y[...] = jnp.where(r.positions(v.shape, 0) >= 17, 0.0, v).astype(y.dtype)

    verdict = parity(scaled(tailed), **FEW)
    assert not verdict.ok
    found = verdict.findings[0]
    assert (found.property, found.direction, found.output) == ("parity", "forward", "y")
    assert found.case is not None
    assert found.case.point.sizes["r"] == (18,)
    assert found.case.point.sizes["d"] == 1
    assert not found.case.kinds
    with pytest.raises(ParityError) as caught:
        verdict.check()
    assert str(caught.value).startswith("tailed[parity]: parity (forward): y is off by ")


def test_only_one_class_of_values_is_wrong() -> None:
    def cautious(x: Ref, w: Ref, y: Ref, r: Dim) -> None:
        v = x[...].astype(F32)
        y[...] = (jnp.where(jnp.isnan(v), 0.0, v) * w[...].astype(F32)).astype(y.dtype)

    verdict = parity(scaled(cautious), properties=["parity"], examples=60, shapes=3)
    (found,) = verdict.findings
    assert found.case is not None
    assert dict(found.case.kinds) == {"x": "nan"}
    assert (found.ulps, str(found.want)) == (float("inf"), "nan")
    assert verdict.json()["properties"][0]["findings"][0]["want"] == "nan"


def test_one_finding_is_enough() -> None:
    def doubled(x: Ref, w: Ref, y: Ref, r: Dim) -> None:
        y[...] = 2 * x[...] * w[...]

    verdict = parity(scaled(doubled), stop_at_first=True, shrink=False)
    assert len(verdict.findings) == 1
    assert sum(r.cases for r in verdict.results) <= 4


def test_a_flaky_kernel_is_called_that() -> None:
    ticks = itertools.count(1)

    def restless(x: Ref, w: Ref, y: Ref, r: Dim) -> None:
        def now(_: Any) -> Any:
            return jnp.float32(next(ticks))

        tick = jax.pure_callback(now, jax.ShapeDtypeStruct((), F32), 0)
        y[...] = (x[...].astype(F32) * w[...].astype(F32) * tick).astype(y.dtype)

    verdict = parity(scaled(restless), properties=["parity"], stop_at_first=True, **FEW)
    (found,) = verdict.findings
    assert found.property == "deterministic"
    assert found.what == f"not deterministic: in two runs of one program y[0, 0] is {found.got!r} and {found.want!r}"


def no_package(x: "Tensor", w: "Tensor") -> "Tensor":
    import surely_not_installed  # type: ignore[import-not-found]

    return surely_not_installed.multiply(x, w)


def too_short(x: "Tensor", w: "Tensor") -> "Tensor":
    return (x * w)[..., :-1]


def two_results(x: "Tensor", w: "Tensor") -> "tuple[Tensor, Tensor]":
    return x * w, x


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        (no_package, "its reference needs the package 'surely_not_installed'. Run: pip install surely_not_installed"),
        (too_short, "its reference gives y of shape ("),
        (two_results, "its reference gives 2 results; expected 1: y"),
    ],
)
def test_a_reference_that_is_of_no_use(reference: Any, found: str) -> None:
    verdict = parity(scaled(right, reference), stop_at_first=True, shrink=False, **FEW)
    assert len(verdict.findings) == 1
    assert found in verdict.findings[0].what


def test_a_kernel_without_reference_is_asked_what_needs_none() -> None:
    verdict = parity(scaled(right, None), **FEW)
    assert (verdict.findings, verdict.ok, verdict.unjudged) == ((), False, "it has no reference")
    asked = {r.property: (r.cases > 0, r.skipped) for r in verdict.results}
    without = (False, "it has no reference")
    assert asked == {
        "parity": without, "configs_agree": without, "strides": without,
        "written_everywhere": without, "deterministic": (True, ""), "batch_invariant": (True, ""), "arithmetic": (True, ""),
        "semantics": (True, ""), "compiles": (False, "no target was named"),
    }  # fmt: skip
    with pytest.raises(ParityError) as caught:
        verdict.check()
    assert str(caught.value) == (
        f"{verdict.kernel}[parity]: it has no reference; expected one, for its results to be judged by. "
        "Give the decorator reference=: the same in plain torch."
    )


def test_what_needs_no_reference_is_found_without_one() -> None:
    def half(x: Ref, w: Ref, y: Ref, r: Dim) -> None:
        y[:4] = (x[:4].astype(F32) * w[...].astype(F32)).astype(y.dtype)

    verdict = parity(scaled(half, None), **FEW)
    assert {f.property for f in verdict.findings} == {"semantics"}
    assert "depends on what uninitialised memory holds" in verdict.findings[0].what


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what is mapped from /proc")
def test_no_device_library_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from tpukern import kernels\nfrom tpukern.testing import parity\n"
        "assert parity(kernels.rms_norm, properties=['strides'], directions=['forward'], shapes=1).ok\n"
        "import os, sys\n"
        "mapped = [n for n in ('libtpu', 'torch_tpu') if n in open('/proc/self/maps').read()]\n"
        "print('torch' in sys.modules, mapped, os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "True [] None\n"), done.stderr


def test_a_kernel_that_never_ends() -> None:
    def endless(x: Ref, w: Ref, y: Ref, r: Dim) -> None:
        v = x[...].astype(F32) * w[...].astype(F32)
        y[...] = jax.lax.while_loop(lambda s: jnp.min(s) < 1e30, lambda s: s * 0, v).astype(y.dtype)

    verdict = parity(scaled(endless, dtypes=("float32",)), timeout=2, **FEW)
    (found,) = verdict.findings
    assert found.property == "semantics"
    assert "hang in endless in grid step (" in found.what
    assert "still running after 2 s" in found.what


def test_what_there_is_to_ask() -> None:
    k = scaled(right)
    with pytest.raises(ConfigError) as caught:
        parity(k, properties=["paritty"])
    assert str(caught.value) == (
        f"right[config]: no property 'paritty'; expected one of {list(PROPERTIES)}. Did you mean 'parity'."
    )
    with pytest.raises(ConfigError) as caught:
        parity(k, directions=["sideways"])
    assert str(caught.value) == "right[config]: no direction 'sideways'; expected 'forward' or 'backward'."
    with pytest.raises(ConfigError, match="no target 'v3'"):
        parity(k, targets=["v3"])


def test_failures_are_kept_and_tried_first(tmp_path: Path) -> None:
    def late(x: Ref, w: Ref, y: Ref, r: Dim) -> None:
        v = x[...].astype(F32) * w[...].astype(F32)
        y[...] = jnp.where(r.positions(v.shape, 0) >= 18, 0.0, v).astype(y.dtype)

    k = scaled(late)
    first = parity(k, store=tmp_path, properties=["parity"], **FEW)
    assert [c for c in kept(tmp_path, k) if c == first.findings[0].case]
    again = parity(k, store=tmp_path, properties=["parity"], stop_at_first=True, shrink=False, **FEW)
    assert again.findings[0].case == first.findings[0].case
    assert next(r.cases for r in again.results) == 1


def test_gradients_are_judged_with_their_forward_kernel() -> None:
    @kernel(reference=scaled_reference, tolerance=2)
    def forward(x: Ref = In("*r d"), w: Ref = In("_ d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
        right(x, w, y, r)

    @forward.backward
    def backward(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
        rows = tuple(range(x.ndim - 1))
        return {"dx": dy * w, "dw": jnp.sum(x.astype(F32) * dy.astype(F32) * 1.01, axis=rows)}

    verdict = parity(backward, shrink=False, properties=["parity", "finite_difference"], **FEW)
    assert verdict.kernel == "forward"
    assert answers(verdict) == {("parity", "backward"): 1, ("finite_difference", "backward"): 0}
    assert verdict.findings[0].output == "dw"
