"""What dispatch costs the host: an overridden op against calling its kernel directly, and against torch_tpu's jax_op.

A fourth way, `bare`, is the floor: an op whose `torch.library` function does nothing but call the kernel. What it takes beyond
`direct` is PyTorch's dispatcher on its way to a Python function, which every override in Python pays.

Beside them, one op in both frontends: a linear layer written in Pallas and in Helion, called as kernels. The host should not
be able to tell.

    python benchmarks/dispatch.py [--rounds 200] [--calls 40]

Prints one JSON object. All ways run the same kernel on the same tensors and take turns in short rounds, with the device
drained in between, so that what else the machine does falls on all of them alike. Times are of the calling thread, in
microseconds, the tenth percentile over rounds; the ratios are of those.
"""

import argparse
import gc
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import tpukern

LIMITS = {"overridden_to_direct": 1.6, "overridden_to_jax_op": 0.4}
HELION_TO_PALLAS = 1.1

LIBRARIES: list[Any] = []  # a library's ops go with it


def measure(ways: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, float]:
    """Returns microseconds a call."""
    import torch

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, call in ways.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds[name].append((time.perf_counter() - start) / calls)
            torch.accelerator.synchronize()
    gc.enable()
    return {name: 1e6 * sorted(times)[len(times) // 10] for name, times in seconds.items()}


def direct(kernel: Any, tensors: tuple[Any, ...]) -> Callable[[], Any]:
    """Returns a call of torch_tpu's own entry point for the kernel that was registered last for these tensors."""
    from torch_tpu._internal.pallas import tpu_torch_pallas as native

    from tpukern.launching import launcher

    plan = list(launcher(kernel).plans.values())[-1]
    name, fingerprint, like = plan.prepared.entry
    inputs = list(tensors)
    return lambda: native.call_custom_kernel(name, fingerprint, inputs=inputs, output_shapes=like)


def bare(name: str, schema: str, call: Callable[[], Any], single: bool) -> Callable[..., Any]:
    """Returns an op of this schema whose function ignores its arguments and makes the call."""
    import torch

    library = torch.library.Library("tpukern_benchmark_bare", "FRAGMENT")
    LIBRARIES.append(library)
    library.define(f"{name}{schema}")
    library.impl(name, lambda *_: call()[0] if single else tuple(call()), "PrivateUse1")
    return getattr(torch.ops.tpukern_benchmark_bare, name).default  # type: ignore[no-any-return]


def jax_op(name: str, kernel: Any, tensors: tuple[Any, ...], **statics: Any) -> Callable[[], Any]:
    """Returns a call of the same kernel as an op made by torch_tpu's public `jax_op`."""
    import inspect

    import jax
    import torch

    from tpukern.dsl import using

    outputs = len(kernel.declaration.outputs)

    def function(*arrays: Any) -> Any:
        with using(interpret=tpukern.device_kind() != "tpu"):
            return kernel(*arrays, **statics)

    names = [o.name for o in kernel.declaration.inputs]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind, annotation=jax.Array) for n in names],
        return_annotation=jax.Array if outputs == 1 else tuple[(jax.Array,) * outputs],  # type: ignore[misc]
    )
    op = torch.tpu.pallas.jax_op(f"tpukern_benchmark::{name}", function)
    return lambda: op(*tensors)


def cases() -> dict[str, dict[str, Callable[[], Any]]]:
    """Returns, for each op, the ways to run its kernel."""
    import torch

    from tpukern.kernels import matmul, rms_norm

    x, w = torch.randn(8, 128, device="tpu"), torch.randn(128, device="tpu")
    a, b = torch.randn(8, 128, device="tpu"), torch.randn(128, 128, device="tpu")
    fused, mm = torch.ops.aten._fused_rms_norm.default, torch.mm
    fused(x, [128], w, 1e-6), mm(a, b)
    direct_rms_norm, direct_mm = direct(rms_norm, (x, w)), direct(matmul, (a, b))
    schema = "(Tensor x, SymInt[] shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"
    bare_rms_norm = bare("rms_norm", schema, direct_rms_norm, False)
    bare_mm = bare("mm", "(Tensor a, Tensor b) -> Tensor", direct_mm, True)
    return {
        "rms_norm": {
            "overridden": lambda: fused(x, [128], w, 1e-6),
            "bare": lambda: bare_rms_norm(x, [128], w, 1e-6),
            "direct": direct_rms_norm,
            "jax_op": jax_op("rms_norm", rms_norm, (x, w), eps=1e-6),
        },
        "mm": {
            "overridden": lambda: mm(a, b),
            "bare": lambda: bare_mm(a, b),
            "direct": direct_mm,
            "jax_op": jax_op("mm", matmul, (a, b)),
        },
    }


def frontends() -> dict[str, Callable[[], Any]]:
    """Returns one op, in each frontend."""
    import torch

    from tpukern.kernels import linear, linear_helion

    x, w, b = torch.randn(8, 128, device="tpu"), torch.randn(128, 128, device="tpu"), torch.randn(128, device="tpu")
    return {"pallas": lambda: linear(x, w, b, act="relu"), "helion": lambda: linear_helion(x, w, b, act="relu")}


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of dispatch, as ratios.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=40)
    options = parser.parse_args()
    device = tpukern.enable(opt_in=["aten::mm"])
    import torch

    torch.set_num_threads(1)
    found = {}
    with torch.no_grad():
        for name, ways in cases().items():
            for call in ways.values():
                call()
            torch.accelerator.synchronize()
            us = measure(ways, options.rounds, options.calls)
            found[name] = {
                "us": {way: round(time, 2) for way, time in us.items()},
                "overridden_to_direct": round(us["overridden"] / us["direct"], 3),
                "bare_to_direct": round(us["bare"] / us["direct"], 3),
                "overridden_to_bare": round(us["overridden"] / us["bare"], 3),
                "overridden_to_jax_op": round(us["overridden"] / us["jax_op"], 3),
            }
        both = frontends()
        for call in both.values():
            call()
        us = measure(both, options.rounds, options.calls)
    ratio = round(us["helion"] / us["pallas"], 3)
    report = {
        "device": device,
        "clock": "perf_counter of the calling thread",
        "rounds": options.rounds,
        "calls": options.calls,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "torch_tpu", "jax")},
        "python": platform.python_version(),
        "limits": LIMITS,
        "cases": found,
        "frontends": {"us": {way: round(time, 2) for way, time in us.items()}, "helion_to_pallas": ratio},
        "ok": ratio <= HELION_TO_PALLAS
        and all(case[name] <= limit for case in found.values() for name, limit in LIMITS.items()),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
