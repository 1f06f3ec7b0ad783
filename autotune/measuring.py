"""Times measured on this machine's TPU, in place of estimates: what `tpukern tune --device` takes.

A config runs under JAX's profiler, and its time is that of the compiled program on the device, as the trace has it, not of the
host's clock: launching and transfers are not in it. **Never run on hardware**: written on a machine without a TPU. A test says
only that a machine without one is told so.
"""

import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from tpukern import device
from tpukern.autotune.trials import Trial
from tpukern.compiling import Job
from tpukern.errors import CompileError, DeviceError, TpukernError

MEASURED: Final = "measured"
SAMPLES: Final = 10
_WARM: Final = 3
_PROGRAMS: Final = "XLA Modules"  # the line of a device's plane that has one event for each run of a program


def measure(jobs: Sequence[Job], on_result: Callable[[int, Any], None]) -> None:
    """Runs every job on the TPU, one after the other.

    Args:
        jobs: What to run.
        on_result: Called with the place of a job and its trial, or why there is none.

    Raises:
        DeviceError: There is no TPU, or it is of another generation than a job's target.
    """
    import jax

    if device.kind() != "tpu" or jax.default_backend() != "tpu":
        raise DeviceError("tune", "no TPU to measure on", "one that JAX uses", "Leave --device out to estimate.")
    chip = device.target()
    for place, job in enumerate(jobs):
        if chip is None or job.target.name != chip.name:
            here = "a TPU that tpukern does not know" if chip is None else f"a {chip.name}"
            raise DeviceError("tune", f"this machine has {here}", f"the target, {job.target.name}")
        try:
            on_result(place, _timed(job))
        except TpukernError as error:
            on_result(place, error)
        except Exception as error:  # what JAX raises for a kernel that the compiler refuses
            lines = str(error).strip().splitlines() or [type(error).__name__]
            on_result(place, CompileError(_name(job), lines[0], target=job.target.name))


def _name(job: Job) -> str:
    return job.bound.kernel.name


def _timed(job: Job) -> Trial:
    import jax

    from tpukern.dsl import context

    bound: Any = job.bound
    rng = np.random.default_rng(0)
    inputs = [
        jax.numpy.asarray(
            rng.standard_normal(spec.shape, np.float32) if "float" in str(spec.dtype) else np.zeros(spec.shape), spec.dtype
        )
        for spec in bound.specs
    ]
    with context.entered(context.Context(target=job.target, interpret=False)):
        program = jax.jit(bound.function).lower(*inputs).compile()
    for _ in range(_WARM):
        jax.block_until_ready(program(*inputs))
    with tempfile.TemporaryDirectory(prefix="tpukern-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(SAMPLES):
                jax.block_until_ready(program(*inputs))
        samples = tuple(us for file in pathlib.Path(folder).rglob("*.xplane.pb") for us in device_us(file))
    if not samples:
        raise CompileError(_name(job), "the profiler's trace has no run of the program", target=job.target.name)
    return Trial(config=bound.config, us=statistics.median(samples), source=MEASURED, samples=samples)


def device_us(trace: pathlib.Path) -> Iterator[float]:
    """Yields how long each run of a program took on the first TPU of a trace, microseconds."""
    from jax.profiler import ProfileData

    for plane in sorted(ProfileData.from_file(str(trace)).planes, key=lambda plane: plane.name):
        if plane.name.startswith("/device:TPU"):
            for line in plane.lines:
                if line.name == _PROGRAMS:
                    yield from (event.duration_ns / 1e3 for event in line.events)
            return
