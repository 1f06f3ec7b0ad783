"""Bounds beside what was measured."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tpukern import kernels
from tpukern.cli.output import Output
from tpukern.cli.verify import show
from tpukern.testing.findings import Finding, Result, Verdict, Worst

ROOT = Path(__file__).parent.parent


def verdict(worst: tuple[Worst, ...], examples: int = 2000, findings: tuple[Finding, ...] = ()) -> Verdict:
    result = Result(property="parity", direction="forward", cases=1, findings=findings)
    return Verdict(kernel="mine", results=(result,), worst=worst, examples=examples, seed=0, seconds=1.0)


def worst(output: str, ulps: float, dtype: str = "float32", bound: float = 2.0) -> Worst:
    return Worst(output=output, direction="forward", dtype=dtype, ulps=ulps, bound=bound)


def test_a_bound_is_compared_with_the_worst_of_the_results_that_share_it() -> None:
    few, most, half = worst("y", 0.1), worst("dx", 0.4), worst("y", 0.3, "bfloat16")
    assert verdict((few, most)).wide == (most,)
    assert verdict((few, most), examples=1999).wide == ()
    assert verdict((few, worst("dx", 0.5))).wide == ()
    assert verdict((few, most, half, worst("dw", 0.1, bound=0.5))).wide == (most, half, worst("dw", 0.1, bound=0.5))
    assert verdict((few, most), findings=(Finding(property="parity", direction="forward", what=""),)).wide == ()
    assert verdict((few, most)).json()["wide"] == [{"dtype": "float32", "bound": 2.0, "ulps": 0.4, "output": "dx"}]


def test_verify_says_which_bound_is_wide(capsys: pytest.CaptureFixture[str]) -> None:
    show(Output(as_json=False), verdict((worst("y", 0.1), worst("dx", 0.4))))
    assert capsys.readouterr().err.splitlines()[0] == (
        "mine: the bound of 2 ULP for float32 is wide: dx errs by 0.4, and nothing by more; expected at most 4 times that. "
        "Lower its tolerance."
    )


def test_the_shipped_kernels_are_bounded_by_what_was_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gen_tolerances.py"), "--check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_bound_that_does_not_fit_what_was_measured_is_named() -> None:
    spec = importlib.util.spec_from_file_location("gen_tolerances", ROOT / "tools" / "gen_tolerances.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    now = kernels.swiglu.tolerance

    def record(f32: float, bf16: float, bound: float = now["float32"]) -> dict[str, Any]:
        half = {"output": "y", "dtype": "bfloat16", "ulps": bf16, "bound": now["bfloat16"]}
        return {"worst": [{"output": "y", "dtype": "float32", "ulps": f32, "bound": bound}, half]}

    def faults(of: dict[str, Any], name: str = "swiglu") -> list[str]:
        return list(tool.faults({"kernels": {name: of}}))

    f32, bf16 = now["float32"] / 2, now["bfloat16"] / 2
    assert faults(record(f32, bf16)) == []
    assert faults(record(f32, now["bfloat16"] / 5)) == [
        "swiglu: the bound of 1 for bfloat16 is 5.0 times the worst; expected 1 to 4"
    ]
    assert faults(record(now["float32"] * 2, bf16)) == [
        "swiglu: the bound of 20 for float32 is 0.5 times the worst; expected 1 to 4"
    ]
    assert faults(record(3.0, bf16, bound=6.0)) == ["swiglu: y was measured beside a bound of 6 for float32, which is 20 now"]
    assert faults(record(f32, bf16), "swiglue") == ["swiglue: measured, but there is no such kernel"]
