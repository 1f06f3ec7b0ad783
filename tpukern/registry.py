"""The kernels and overrides that torch knows of: the one place where dispatch keeps state between calls."""

import dataclasses
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tpukern.dsl import Kernel
    from tpukern.launching import Launcher
    from tpukern.overriding import Active
    from tpukern.torch_ops import TorchOp


@dataclasses.dataclass
class Registry:
    """Everything that is registered.

    Attributes:
        ops: Kernels registered as torch ops, by op name.
        launchers: By kernel and whether for CPU tensors.
        active: Installed overrides, by (op, dispatch key).
        guards: Backward passes that stay for marked tensors while their override is not installed, by the same.
        device: The kind of device that `enable` started, None before.
        digests: Of the kernels' sources, by op name.
        user_tag: What the user had in `torch.compiler.config.cache_key_tag`.
        tag: What tpukern made of it, None before it did.
        left_out: Overrides that are not installed, and why.
    """

    ops: dict[str, "TorchOp"] = dataclasses.field(default_factory=dict)
    launchers: dict[tuple["Kernel", bool], "Launcher"] = dataclasses.field(default_factory=dict)
    active: dict[tuple[str, str], "Active"] = dataclasses.field(default_factory=dict)
    guards: dict[tuple[str, str], "Active"] = dataclasses.field(default_factory=dict)
    device: str | None = None
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    user_tag: str = ""
    tag: str | None = None
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


REGISTRY: Final = Registry()
