"""Which configs a kernel has for a signature, and which one to start from."""

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tpukern.dsl.config import Config
from tpukern.dsl.declaration import unknown_keyword
from tpukern.dsl.geometry import Geometry
from tpukern.dsl.signature import Signature
from tpukern.errors import ConfigError, TpukernError
from tpukern.targets import Target

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel


def resolve(kernel: "Kernel", signature: Signature, given: Mapping[str, Any], base: Config, target: Target | None) -> Config:
    """Returns `base` with the keys of `given`, in canonical form.

    Raises:
        ConfigError: A key or a value is none that the kernel has, or `reject` refuses the config.
        LowerError: Mosaic cannot tile a block.
    """
    known = (*kernel.declaration.keys, *(key for key in base if "." in key))
    for key in given:
        if key not in known and not (key == "order" and kernel.is_tile):
            raise ConfigError(*unknown_keyword(kernel.name, key, (*kernel.declaration.statics, *known), ("order",)))
    config = Config({**base, **{key: _value(kernel, key, value) for key, value in given.items()}})
    problem = _problem(kernel, signature, config, target)
    if problem is not None:
        raise problem
    return canonical(kernel, signature, config)


def _value(kernel: "Kernel", key: str, value: Any) -> Any:
    """Checks the value of one key; a choice may be given by its text, as on a command line."""
    if key in kernel.declaration.choices:
        choices = kernel.declaration.choices[key].choices
        for choice in choices:
            if (choice == value and type(choice) is type(value)) or str(choice) == str(value):
                return choice
        raise ConfigError(kernel.name, f"{key} = {value!r}", f"one of {list(choices)}")
    if "." in key:
        return value
    if key == "order":
        if not isinstance(value, str):
            raise ConfigError(kernel.name, f"order = {value!r}", f"a string of the dims {list(kernel.declaration.grid)}")
        return " ".join(value.split())
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(kernel.name, f"{key} = {value!r}", "a positive int")
    return value


def _problem(kernel: "Kernel", signature: Signature, config: Config, target: Target | None) -> TpukernError | None:
    if kernel.is_tile:
        problem = Geometry(kernel.declaration, signature, config).problem()
        if problem is not None:
            return problem
    reason = kernel.reject(config, signature, target) if kernel.reject else None
    if reason is None:
        return None
    name = target.name if target else None
    return ConfigError(kernel.name, f"config {config} is rejected: {reason}", "another config", target=name)


def canonical(kernel: "Kernel", signature: Signature, config: Config) -> Config:
    """Returns the one config that stands for all that are equal after min(block, size).

    A block that covers its dim becomes the smallest choice that does; an order that moves only dims of one step is dropped.
    """
    items = dict(config)
    for name in kernel.declaration.blocks:
        key, size = f"block_{name}", signature.sizes[name]
        if items[key] >= size:
            items[key] = min((c for c in kernel.declaration.dims[name].choices if c >= size), default=max(size, 1))
    order = items.pop("order", None)
    if order is not None:
        geometry = Geometry(kernel.declaration, signature, config)
        moves = [name for name in order.split() if geometry.extents[name].count > 1]
        if moves != [name for name in kernel.declaration.grid if name in moves]:
            items["order"] = order
    return Config(items)


def own_default(kernel: "Kernel") -> Config:
    """Returns the declared defaults of the kernel's own keys."""
    k = kernel.declaration
    blocks = {f"block_{name}": k.dims[name].default for name in k.blocks}
    return Config({**blocks, **{name: tunable.default for name, tunable in k.choices.items()}})


def configs(kernel: "Kernel", signature: Signature, target: Target | None) -> tuple[Config, ...]:
    """Returns the distinct legal configs, in the order of the declared choices."""
    k = kernel.declaration
    spaces: list[list[Config]] = [[Config({f"block_{name}": c}) for c in k.dims[name].choices] for name in k.blocks]
    spaces += [[Config({name: value}) for value in tunable.choices] for name, tunable in k.choices.items()]
    for call in kernel.calls(signature):
        spaces.append([c.prefixed(call.kernel.name) for c in call.free_configs(target)])
    found: dict[Config, None] = {}
    for parts in itertools.product(*spaces):
        config = canonical(kernel, signature, Config({key: value for part in parts for key, value in part.items()}))
        if config not in found and _problem(kernel, signature, config, target) is None:
            found[config] = None
    return tuple(found)


def default(kernel: "Kernel", signature: Signature, target: Target | None) -> Config:
    """Returns the declared defaults, stepped down until they are legal and, on a target, their VMEM estimate fits.

    Raises:
        ConfigError: No config is legal.
        LowerError: The same, for Mosaic's sake.
    """
    start = own_default(kernel)
    for call in kernel.calls(signature):
        start = Config({**start, **call.free(call.kernel.default_config(call.signature, target)).prefixed(call.kernel.name)})
    start = canonical(kernel, signature, start)
    problem = _problem(kernel, signature, start, target)
    if problem is None and _fits(kernel, signature, start, target):
        return start
    legal = configs(kernel, signature, target)
    if not legal:
        assert problem is not None
        raise problem
    below = [c for c in legal if _below(kernel, c, start)] or legal
    fitting = [c for c in below if _fits(kernel, signature, c, target)]
    if fitting:
        return max(fitting, key=lambda c: _volume(kernel, signature, c))
    return min(below, key=lambda c: _volume(kernel, signature, c))


def largest(kernel: "Kernel", signature: Signature) -> Config:
    """Returns the legal config of the largest blocks, choices as declared: interpret form pays by the grid step.

    Raises:
        ConfigError: No config is legal.
        LowerError: The same, for Mosaic's sake.
    """
    start = own_default(kernel)
    biggest = {f"block_{name}": max(kernel.declaration.dims[name].choices) for name in kernel.declaration.blocks}
    inner: dict[str, Any] = {}
    for call in kernel.calls(signature):
        inner.update(call.free(call.kernel.largest_config(call.signature)).prefixed(call.kernel.name))
    config = canonical(kernel, signature, Config({**start, **biggest, **inner}))
    if _problem(kernel, signature, config, None) is None:
        return config
    legal = configs(kernel, signature, None)
    if not legal:
        return default(kernel, signature, None)
    usual = [c for c in legal if all(c[name] == start[name] for name in kernel.declaration.choices)] or legal
    return max(usual, key=lambda c: _volume(kernel, signature, c))


def _below(kernel: "Kernel", config: Config, start: Config) -> bool:
    k = kernel.declaration
    blocks = (f"block_{name}" for name in k.blocks)
    return all(config[key] <= start[key] for key in blocks) and all(config[name] == start[name] for name in k.choices)


def _volume(kernel: "Kernel", signature: Signature, config: Config) -> int:
    return math.prod(min(config[f"block_{name}"], signature.sizes[name]) for name in kernel.declaration.blocks)


def _fits(kernel: "Kernel", signature: Signature, config: Config, target: Target | None) -> bool:
    if target is None or not kernel.is_tile:
        return True
    limit = min(kernel.vmem_limit_bytes or target.scoped_vmem_bytes, target.vmem_bytes)
    return Geometry(kernel.declaration, signature, config).vmem_bytes <= limit
