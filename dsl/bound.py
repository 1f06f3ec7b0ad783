"""A kernel bound to one signature and one config: what every later stage starts from."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tpukern.dsl import context, rendering
from tpukern.dsl.config import Config
from tpukern.dsl.signature import Signature
from tpukern.targets import Target

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """One kernel, ready to be traced.

    Attributes:
        kernel: The kernel.
        signature: Shapes, dtypes and statics.
        config: Every config key that the kernel has.
        target: The chip that the config was chosen for, or None.
        function: The JAX callable: inputs in declared order to the tuple of outputs. It runs under the context in force
            when it is traced.
    """

    kernel: "Kernel"
    signature: Signature
    config: Config
    target: Target | None
    function: Callable[..., tuple[jax.Array, ...]] = dataclasses.field(compare=False, repr=False)

    @property
    def specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The inputs' shapes and dtypes, for `jax.jit(bound.function).lower(*bound.specs)`."""
        return specs_of(self.signature)

    @functools.cached_property
    def calls(self) -> tuple[Any, ...]:
        """Every `pallas_call` in it, read off the jaxpr traced for a TPU, with the names of dims and operands."""
        from tpukern.dsl import ir  # only tools need it

        with context.entered(context.Context(target=self.target, interpret=False)):
            calls = ir.calls_of(self.function, *self.specs, target=self.target)
        return tuple(rendering.named(self, call) for call in calls)

    def text(self) -> str:
        """Returns a readable account: signature, config, grid, blocks, index maps, scratch, semantics, aliases and VMEM."""
        return rendering.render(self)


def specs_of(signature: Signature) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes and dtypes of a signature's inputs."""
    return tuple(jax.ShapeDtypeStruct(o.shape, jnp.dtype(o.dtype)) for o in signature.inputs)
