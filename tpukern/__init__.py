"""tpukern: write, check, tune and ship TPU kernels for PyTorch, on a machine that has no TPU.

Importing this package is cheap: it loads neither torch, jax, helion nor libtpu. Every public name is looked up in
`_EXPORTS` on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tpukern.errors import (
    CompileError,
    ConfigError,
    DeviceError,
    LowerError,
    OverrideError,
    ParityError,
    RecordError,
    SignatureError,
    TpukernError,
    TuneError,
)
from tpukern.targets import TARGETS, Target, target
from tpukern.version import __version__

if TYPE_CHECKING:
    from tpukern.autotune.estimating import Estimate, estimate
    from tpukern.autotune.tuning import Tuned, tune
    from tpukern.compiling import Compiled, compile
    from tpukern.device import device_kind
    from tpukern.dispatch import disable, enable, overrides
    from tpukern.dsl import (
        Acc,
        Block,
        Choice,
        Dim,
        Each,
        In,
        Kernel,
        Out,
        Override,
        Prefetch,
        Ref,
        Scalar,
        Scratch,
        Workload,
        from_helion_config,
        to_helion_config,
    )
    from tpukern.dsl.adoption import adopt
    from tpukern.dsl.decorator import kernel
    from tpukern.explanation import explain
    from tpukern.lowering import Lowered, lower

_EXPORTS = {
    "Acc": "tpukern.dsl",
    "Block": "tpukern.dsl",
    "Choice": "tpukern.dsl",
    "Dim": "tpukern.dsl",
    "Each": "tpukern.dsl",
    "In": "tpukern.dsl",
    "Kernel": "tpukern.dsl",
    "Out": "tpukern.dsl",
    "Override": "tpukern.dsl",
    "Prefetch": "tpukern.dsl",
    "Ref": "tpukern.dsl",
    "Scalar": "tpukern.dsl",
    "Scratch": "tpukern.dsl",
    "Workload": "tpukern.dsl",
    "from_helion_config": "tpukern.dsl",
    "adopt": "tpukern.dsl.adoption",
    "kernel": "tpukern.dsl",
    "to_helion_config": "tpukern.dsl",
    "Lowered": "tpukern.lowering",
    "lower": "tpukern.lowering",
    "Compiled": "tpukern.compiling",
    "compile": "tpukern.compiling",
    "device_kind": "tpukern.device",
    "enable": "tpukern.dispatch",
    "disable": "tpukern.dispatch",
    "overrides": "tpukern.dispatch",
    "explain": "tpukern.explanation",
    "Estimate": "tpukern.autotune.estimating",
    "estimate": "tpukern.autotune.estimating",
    "Tuned": "tpukern.autotune.tuning",
    "tune": "tpukern.autotune.tuning",
}

__all__ = [
    "TARGETS",
    "Acc",
    "Block",
    "Choice",
    "CompileError",
    "Compiled",
    "ConfigError",
    "DeviceError",
    "Dim",
    "Each",
    "Estimate",
    "In",
    "Kernel",
    "LowerError",
    "Lowered",
    "Out",
    "Override",
    "OverrideError",
    "ParityError",
    "Prefetch",
    "RecordError",
    "Ref",
    "Scalar",
    "Scratch",
    "SignatureError",
    "Target",
    "TpukernError",
    "TuneError",
    "Tuned",
    "Workload",
    "__version__",
    "adopt",
    "compile",
    "device_kind",
    "disable",
    "enable",
    "estimate",
    "explain",
    "from_helion_config",
    "kernel",
    "lower",
    "overrides",
    "target",
    "to_helion_config",
    "tune",
]


def __getattr__(name: str) -> Any:
    home = _EXPORTS.get(name)
    if home is None:
        raise AttributeError(f"module 'tpukern' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
