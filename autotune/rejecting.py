"""What is refused before it is compiled: a kernel that cannot fit VMEM, whatever the compiler does.

libtpu needs seconds to say so (1 to 5 s for an overflow, against 0.3 to 2 s for a kernel that compiles). The bound is from
below: blocks, each as often as the pipeline holds it, and scratch, without padding and without Mosaic's temporaries. XLA may
keep an array whole in VMEM, where it needs no blocks; it was seen to do so with small ones, so arrays of up to a quarter of
VMEM do not count.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from tpukern.dsl import dtypes
from tpukern.errors import CompileError, TpukernError
from tpukern.targets import MIB, Target

_KEPT_WHOLE: Final = 4  # an array of more than 1/4 of VMEM is in HBM


def floor_bytes(call: Any, target: Target) -> int:
    """Returns the VMEM that a `pallas_call` cannot do without."""
    total = 0
    for use in call.blocks:
        if use.memory_space != "vmem" or _bytes(use.shape, use.dtype) <= target.vmem_bytes // _KEPT_WHOLE:
            continue
        moves = any((call.grid[dim] or 0) > 1 for dim in use.index_map.depends_on)
        total += _bytes(use.ref_shape, use.dtype) * (use.buffers if moves else 1)
    return total + sum(_bytes(b.shape, b.dtype) for b in call.scratch if b.memory_space == "vmem")


def _bytes(shape: Sequence[int], dtype: str) -> int:
    if dtype in ("int4", "uint4"):
        return math.prod(shape) // 2
    return math.prod(shape) * dtypes.ITEM_BYTES.get(dtype, 1)


def check(job: Any) -> None:
    """Raises CompileError, as the compiler would, if a kernel of a job cannot fit VMEM."""
    for call in _calls(job):
        limit = min(call.vmem_limit_bytes or job.target.scoped_vmem_bytes, job.target.vmem_bytes)
        needed = floor_bytes(call, job.target)
        if needed > limit:
            space = "VMEM" if limit == job.target.vmem_bytes else "scoped VMEM"
            raise CompileError(
                job.bound.kernel.name,
                f"for its blocks and scratch alone {needed / MIB:.2f} MiB of {space} needed",
                f"at most {limit / MIB:.2f} MiB",
                "Choose smaller blocks, or raise vmem_limit_bytes.",
                target=job.target.name,
            )


def _calls(job: Any) -> tuple[Any, ...]:
    try:
        return tuple(job.bound.calls)
    except TpukernError:
        raise
    except Exception:  # a body that cannot be traced: lowering says so, and where
        return ()
