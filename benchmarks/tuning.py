"""The tuner's own figures: configs a second, and whether anything is refused that the compiler accepts.

    python benchmarks/tuning.py throughput      # matmul and rms_norm, nothing known before
    python benchmarks/tuning.py vmem --configs 200

`throughput` prints wall time and CPU time of this process and its workers. On a machine that does other things too, the second
says what two idle cores would reach: 2 / (CPU seconds a config), if both are kept busy. `vmem` draws configs of the shipped
kernels, and compiles every one that the bound of `autotune.rejecting` refuses; the exit status is 1 if one of them compiles.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from typing import Any

import tpukern
from tpukern.autotune import rejecting, tuning
from tpukern.compiling import Job, compile_many
from tpukern.errors import CompileError, TpukernError
from tpukern.kernels import flash_attention, linear, matmul, matmul_nt, matmul_tn, rms_norm, swiglu

CHIPS = ("v5e", "v6e", "v7x")


def cpu_seconds() -> float:
    """CPU time of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def throughput(configs: int | None) -> int:
    """Tunes one workload of two kernels from nothing, and prints how fast."""
    problems = [(matmul, "llama3_8b_gate", configs or 40), (rms_norm, "llama3_8b_prefill", None)]
    print(f"{'kernel':10} {'configs':>7} {'failed':>6} {'wall s':>7} {'CPU s':>7} {'a second':>8} {'on 2 idle cores':>15}")
    for kernel, workload, budget in problems:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TPUKERN_CACHE_DIR"] = folder
            tuning.verifying.check = lambda *_: ("", "not checked: it is once a search, whatever its length")  # type: ignore
            wall, cpu = time.monotonic(), cpu_seconds()
            found = tpukern.tune(kernel, workload=workload, target="v5e", budget=budget, record=False)
            wall, cpu = time.monotonic() - wall, cpu_seconds() - cpu
        failed = sum(found.failures.values())
        row = f"{kernel.name:10} {found.tried:7} {failed:6} {wall:7.1f} {cpu:7.1f} {found.tried / wall:8.2f}"
        print(f"{row} {2 * found.tried / cpu:15.2f}", flush=True)
    return 0


def drawn(count: int, seed: int) -> list[Job]:
    """Returns configs of all shipped kernels, workloads, directions and chips, drawn evenly over the kernels."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        kernel: Any = rng.choice((matmul, matmul_nt, matmul_tn, linear, rms_norm, swiglu, flash_attention))
        workload, target = rng.choice(kernel.workloads), tpukern.target(rng.choice(CHIPS))
        chosen: Any = rng.choice(list(kernel.directions.values()))
        signature = chosen.workload_signature(workload)
        if not chosen.is_tile:
            call = rng.choice(chosen.calls((signature,)))
            chosen, signature = call.kernel, call.signatures[0]
        try:
            config = rng.choice(chosen.configs(signature, target))
            found.append(Job(bound=chosen.bind_signature(signature, config, target), target=target))
        except TpukernError:
            continue
    return found


def vmem(configs: int | None, seed: int) -> int:
    """Compiles what is refused, and prints what should not have been."""
    jobs = drawn(configs or 200, seed)
    refused = []
    for job in jobs:
        try:
            rejecting.check(job)
        except CompileError:
            refused.append(job)
    print(f"{len(jobs)} configs drawn, {len(refused)} refused without a compile", flush=True)
    wrong = 0
    for job, compiled in zip(refused, compile_many(refused, timeout_s=300), strict=True):
        judged = "compiles" if compiled.ok else "overflows" if "VMEM needed" in str(compiled.error) else "fails otherwise"
        if judged != "overflows":
            wrong += compiled.ok
            print(f"{job.bound.kernel.name} {job.target.name} {compiled.config}: {judged}: {compiled.error}", flush=True)
    print(f"{wrong} of {len(refused)} refused wrongly")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("throughput", "vmem"))
    parser.add_argument("--configs", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return throughput(options.configs) if options.what == "throughput" else vmem(options.configs, options.seed)


if __name__ == "__main__":
    sys.exit(main())
