"""The kernel language: what a kernel's author imports.

    from tpukern.dsl import Block, Dim, In, Out, Ref, kernel

It loads jax, never torch, helion or libtpu.
"""

from tpukern import jax_adapter

jax_adapter.load()

from tpukern.dsl.bound import Bound  # noqa: E402 (JAX's platform has to be settled before anything imports it)
from tpukern.dsl.config import Config  # noqa: E402
from tpukern.dsl.context import interpreted, using  # noqa: E402
from tpukern.dsl.decorator import kernel  # noqa: E402
from tpukern.dsl.grid import Dim  # noqa: E402
from tpukern.dsl.helion_configs import from_helion_config, to_helion_config  # noqa: E402
from tpukern.dsl.kernel import Kernel  # noqa: E402
from tpukern.dsl.precision import F32, NEG, dot  # noqa: E402
from tpukern.dsl.roles import Acc, Block, Choice, Each, In, Out, Prefetch, Ref, Scalar, Scratch  # noqa: E402
from tpukern.dsl.signature import Operand, Signature  # noqa: E402
from tpukern.dsl.workload import Override, Workload  # noqa: E402

__all__ = [
    "F32", "NEG", "Acc", "Block", "Bound", "Choice", "Config", "Dim", "Each", "In", "Kernel", "Operand", "Out", "Override",
    "Prefetch", "Ref", "Scalar", "Scratch", "Signature", "Workload", "dot", "from_helion_config", "interpreted", "kernel",
    "to_helion_config", "using",
]  # fmt: skip
