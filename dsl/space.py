"""Which configs a kernel has, and which one to start from.

All of it is asked for one or more signatures at a time: a composite may call a kernel at several, under one config.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tpukern.autotune import recalling
from tpukern.dsl.config import Config
from tpukern.dsl.declaration import unknown_keyword
from tpukern.dsl.geometry import Geometry
from tpukern.dsl.signature import Signature
from tpukern.errors import ConfigError, SignatureError, TpukernError
from tpukern.targets import Target

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel

Signatures = tuple[Signature, ...]


def resolve(kernel: "Kernel", signatures: Signatures, given: Mapping[str, Any], base: Config, target: Target | None) -> Config:
    """Returns `base` with the keys of `given`, in canonical form.

    Raises:
        ConfigError: A key or a value is none that the kernel has, or `reject` refuses the config.
        LowerError: Mosaic cannot tile a block.
    """
    if kernel.helion is not None:
        return kernel.helion.resolve(kernel, signatures[0], given, base, target)
    known = (*kernel.declaration.keys, *(key for key in base if "." in key))
    for key in given:
        if key not in known and not (kernel.is_tile and key == "order") and not _is_order(kernel, signatures, key):
            raise ConfigError(*unknown_keyword(kernel.name, key, (*kernel.declaration.statics, *known), ("order",)))
    own = {key: _value(kernel, key, value) for key, value in given.items() if "." not in key}
    config = Config({**base, **own})
    problem = _problem(kernel, signatures, config, target)
    if problem is not None:
        raise problem
    found = dict(canonical(kernel, signatures, config))
    for call in kernel.calls(signatures):
        inner = Config(given).within(call.kernel.name)
        start = Config({**default(call.kernel, call.signatures, target), **config.within(call.kernel.name)})
        found.update(call.free(resolve(call.kernel, call.signatures, inner, start, target)))
    return Config(found)


def _is_order(kernel: "Kernel", signatures: Signatures, key: str) -> bool:
    """Whether a key is the grid order of a kernel that this one calls: a key that configs have only when it is not usual."""
    called, _, rest = key.partition(".")
    return any(call.kernel.name == called and (rest == "order" or "." in rest) for call in kernel.calls(signatures))


def _value(kernel: "Kernel", key: str, value: Any) -> Any:
    """Checks the value of one key; a choice may be given by its text, as on a command line."""
    if key in kernel.declaration.choices:
        choices = kernel.declaration.choices[key].choices
        for choice in choices:
            if (choice == value and type(choice) is type(value)) or str(choice) == str(value):
                return choice
        raise ConfigError(kernel.name, f"{key} = {value!r}", f"one of {list(choices)}")
    if key == "order":
        if not isinstance(value, str):
            raise ConfigError(kernel.name, f"order = {value!r}", f"a string of the dims {list(kernel.declaration.grid)}")
        return " ".join(value.split())
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(kernel.name, f"{key} = {value!r}", "a positive int")
    return value


def _problem(kernel: "Kernel", signatures: Signatures, config: Config, target: Target | None) -> TpukernError | None:
    for signature in signatures:
        problem: TpukernError | None = None
        if kernel.is_tile:
            problem = Geometry(kernel.declaration, signature, config).problem()
        elif kernel.adopted is not None:
            problem = kernel.adopted.problem(signature)
        reason = kernel.reject(config, signature, target) if kernel.reject and problem is None else None
        if reason is not None:
            where = target.name if target else None
            if config:
                found = f"config {config} is rejected: {reason.rstrip('.')}"
                problem = ConfigError(kernel.name, found, "another config", target=where)
            else:
                problem = SignatureError(kernel.name, f"{signature} is rejected: {reason.rstrip('.')}", target=where)
        if problem is not None:
            return problem
    return None


def _size(signatures: Signatures, name: str) -> int:
    return max(signature.sizes[name] for signature in signatures)


def canonical(kernel: "Kernel", signatures: Signatures, config: Config) -> Config:
    """Returns the one config that stands for all that are equal after min(block, size).

    A block that covers its dim becomes the smallest choice that does; an order that moves only dims of one step is dropped.
    """
    items = dict(config)
    for name in kernel.declaration.blocks:
        key, size = f"block_{name}", _size(signatures, name)
        if items[key] >= size:
            items[key] = min((c for c in kernel.declaration.dims[name].choices if c >= size), default=max(size, 1))
    order = items.pop("order", None)
    if order is not None:
        geometries = [Geometry(kernel.declaration, signature, config) for signature in signatures]
        moves = [name for name in order.split() if any(geometry.extents[name].count > 1 for geometry in geometries)]
        if moves != [name for name in kernel.declaration.grid if name in moves]:
            items["order"] = order
    return Config(items)


def own_default(kernel: "Kernel") -> Config:
    """Returns the declared defaults of the kernel's own keys; none for a Helion kernel, whose keys depend on the shapes."""
    k = kernel.declaration
    if kernel.helion is not None:
        return Config()
    blocks = {f"block_{name}": k.dims[name].default for name in k.blocks}
    return Config({**blocks, **{name: tunable.default for name, tunable in k.choices.items()}})


def configs(kernel: "Kernel", signatures: Signatures, target: Target | None) -> tuple[Config, ...]:
    """Returns the distinct legal configs, in the order of the declared choices; the grid's order is left as declared."""
    if kernel.helion is not None:
        return kernel.helion.configs(kernel, signatures[0], target)
    k = kernel.declaration
    spaces: list[list[Config]] = [[Config({f"block_{name}": c}) for c in k.dims[name].choices] for name in k.blocks]
    spaces += [[Config({name: value}) for value in tunable.choices] for name, tunable in k.choices.items()]
    for call in kernel.calls(signatures):
        spaces.append([call.free(config) for config in configs(call.kernel, call.signatures, target)])
    found: dict[Config, None] = {}
    for parts in itertools.product(*spaces):
        whole = Config({key: value for part in parts for key, value in part.items()})
        config = canonical(kernel, signatures, whole)
        if config not in found and _problem(kernel, signatures, config, target) is None:
            found[config] = None
    return tuple(found)


def default(kernel: "Kernel", signatures: Signatures, target: Target | None) -> Config:
    """Returns the config to use where none is given: on a target the one recorded, else `declared`.

    Raises:
        ConfigError: No config is legal.
        LowerError: The same, for Mosaic's sake.
    """
    known = recorded(kernel, signatures, target)
    return _declared(kernel, signatures, target, default) if known is None else known[0]


def declared(kernel: "Kernel", signatures: Signatures, target: Target | None) -> Config:
    """Returns the declared defaults, stepped down until they are legal and, on a target, their VMEM estimate fits.

    Raises:
        ConfigError: No config is legal.
        LowerError: The same, for Mosaic's sake.
    """
    return _declared(kernel, signatures, target, declared)


def recorded(
    kernel: "Kernel", signatures: Signatures, target: Target | None
) -> tuple[Config, recalling.Recalled] | None:
    """Returns the tuned config that is on record for these sizes or the nearest ones, and which; see `autotune.recalling`."""
    if target is None or len(signatures) != 1:
        return None
    found: list[Config] = []

    def legal(config: Mapping[str, Any], exact: bool) -> bool:
        try:
            whole = _whole(kernel, signatures, config, target)
        except TpukernError:
            return False
        found[:] = [whole]
        return exact or _all_fit(kernel, signatures, whole, target)

    chosen = recalling.recall(kernel.declaration, signatures[0], target, legal)
    return None if chosen is None else (found[0], chosen)


def _whole(kernel: "Kernel", signatures: Signatures, config: Mapping[str, Any], target: Target) -> Config:
    if kernel.helion is not None:
        return kernel.helion.resolve(kernel, signatures[0], config, declared(kernel, signatures, target), target)
    inner = {key: value for key, value in config.items() if "." in key}
    return resolve(kernel, signatures, config, Config({**own_default(kernel), **inner}), target)


def _all_fit(kernel: "Kernel", signatures: Signatures, config: Config, target: Target) -> bool:
    """Whether a config that was tuned at other sizes is within the VMEM estimate of a kernel and of those that it calls."""
    if kernel.helion is not None:
        limit = min(kernel.vmem_limit_bytes or target.vmem_bytes, target.vmem_bytes)
        return kernel.helion.vmem_bytes(kernel, signatures[0], config, target) <= limit
    inner = kernel.calls(signatures)
    return _fits(kernel, signatures, config, target) and all(
        _all_fit(call.kernel, call.signatures, Config({**own_default(call.kernel), **config.within(call.kernel.name)}), target)
        for call in inner
    )


def _declared(
    kernel: "Kernel", signatures: Signatures, target: Target | None, inner: Callable[[Any, Signatures, Any], Config]
) -> Config:
    if kernel.helion is not None:
        return kernel.helion.default(kernel, signatures[0], target)
    items = dict(own_default(kernel))
    for call in kernel.calls(signatures):
        items.update(call.free(inner(call.kernel, call.signatures, target)))
    start = canonical(kernel, signatures, Config(items))
    problem = _problem(kernel, signatures, start, target)
    if problem is None and _fits(kernel, signatures, start, target):
        return start
    legal = configs(kernel, signatures, target)
    if not legal:
        assert problem is not None
        raise problem
    below = [config for config in legal if _below(kernel, config, start)] or legal
    fitting = [config for config in below if _fits(kernel, signatures, config, target)]
    if fitting:
        return max(fitting, key=lambda config: _volume(kernel, signatures, config))
    return min(below, key=lambda config: _volume(kernel, signatures, config))


def largest(kernel: "Kernel", signatures: Signatures) -> Config:
    """Returns the legal config of the largest blocks, choices as declared: interpret form pays by the grid step.

    Raises:
        ConfigError: No config is legal.
        LowerError: The same, for Mosaic's sake.
    """
    if kernel.helion is not None:
        return kernel.helion.largest(signatures[0])
    k, start = kernel.declaration, own_default(kernel)
    items = {**start, **{f"block_{name}": max(k.dims[name].choices) for name in k.blocks}}
    for call in kernel.calls(signatures):
        items.update(call.free(largest(call.kernel, call.signatures)))
    config = canonical(kernel, signatures, Config(items))
    if _problem(kernel, signatures, config, None) is None:
        return config
    legal = configs(kernel, signatures, None)
    if not legal:
        return default(kernel, signatures, None)  # which raises the reason
    usual = [c for c in legal if all(c[name] == start[name] for name in k.choices)] or legal
    return max(usual, key=lambda c: _volume(kernel, signatures, c))


def _below(kernel: "Kernel", config: Config, start: Config) -> bool:
    k = kernel.declaration
    blocks = (f"block_{name}" for name in k.blocks)
    return all(config[key] <= start[key] for key in blocks) and all(config[name] == start[name] for name in k.choices)


def _volume(kernel: "Kernel", signatures: Signatures, config: Config) -> int:
    return math.prod(min(config[f"block_{name}"], _size(signatures, name)) for name in kernel.declaration.blocks)


def _fits(kernel: "Kernel", signatures: Signatures, config: Config, target: Target | None) -> bool:
    if target is None or not kernel.is_tile:
        return True
    limit = min(kernel.vmem_limit_bytes or target.scoped_vmem_bytes, target.vmem_bytes)
    return all(Geometry(kernel.declaration, signature, config).vmem_bytes <= limit for signature in signatures)
