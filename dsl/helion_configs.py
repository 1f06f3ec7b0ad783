"""Helion's configs as ours, and back, without loss.

A list with one entry for each loop or load becomes a key for each entry: `block_m` where the loop's variable is `m` or
`tile_m`, else the list's name and the place, as `loop_orders_0`. What is a list itself is written `[0 1]`, since `,` separates
the keys of a config's text. Every other key keeps its name and value, the author's own fragments (`hl.register_tunable`) too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpukern import helion_adapter
from tpukern.dsl.config import Config
from tpukern.errors import ConfigError

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel


def encode(config: Mapping[str, Any], blocks: Sequence[str]) -> Config:
    """Returns one of Helion's configs as ours.

    Args:
        config: Helion's, as a mapping.
        blocks: Names of the block sizes, without `block_`.
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key not in helion_adapter.LISTS or not isinstance(value, list | tuple):
            found[key] = _text(value)
        elif key == "block_sizes" and len(value) == len(blocks):
            found.update((f"block_{name}", size) for name, size in zip(blocks, value, strict=True))
        else:
            found.update((f"{key}_{place}", _text(entry)) for place, entry in enumerate(value))
    return Config(found)


def decode(kernel: str, config: Mapping[str, Any], blocks: Sequence[str]) -> dict[str, Any]:
    """Returns one of our configs as Helion's, as a mapping; the inverse of `encode`.

    Raises:
        ConfigError: An entry of a list is missing.
    """
    found: dict[str, Any] = {}
    lists: dict[str, dict[int, Any]] = {}
    for key, value in config.items():
        listed = re.fullmatch(r"(.+)_(\d+)", key)
        if key.startswith("block_") and key[6:] in blocks:
            lists.setdefault("block_sizes", {})[list(blocks).index(key[6:])] = value
        elif listed and listed[1] in helion_adapter.LISTS:
            lists.setdefault(listed[1], {})[int(listed[2])] = _value(value)
        else:
            found[key] = _value(value)
    for key, entries in lists.items():
        if sorted(entries) != list(range(len(entries))):
            missing = min(set(range(max(entries) + 1)) - set(entries))
            raise ConfigError(kernel, f"entry {missing} of {key} is missing", f"one for each of {max(entries) + 1}")
        found[key] = [entries[place] for place in sorted(entries)]
    return found


def _text(value: Any) -> Any:
    """Returns a list as text without commas; everything else as it is."""
    if isinstance(value, list | tuple):
        return "[" + " ".join(str(_text(v)) if isinstance(v, list | tuple) else json.dumps(v) for v in value) + "]"
    return value


def _value(value: Any) -> Any:
    if not (isinstance(value, str) and value.startswith("[") and value.endswith("]")):
        return value
    return json.loads(re.sub(r"(?<=[^\[\s])\s+(?=[^\]\s])", ",", value))


def to_helion_config(kernel: "Kernel", config: Mapping[str, Any]) -> Any:
    """Returns a config of a Helion kernel as the `helion.Config` to paste into a Helion project.

    Raises:
        ConfigError: The kernel is none of Helion's, or Helion is not installed.
    """
    if kernel.helion is None:
        raise ConfigError(kernel.name, f"its frontend is {kernel.frontend}", "a kernel of the Helion frontend")
    return helion_adapter.load().Config.from_dict(decode(kernel.name, config, kernel.helion.blocks))


def from_helion_config(kernel: "Kernel", config: Mapping[str, Any]) -> Config:
    """Returns a `helion.Config`, or a mapping like one, as a config of the kernel; `block_size=8` is `block_sizes=[8]`.

    Raises:
        ConfigError: The kernel is none of Helion's.
    """
    if kernel.helion is None:
        raise ConfigError(kernel.name, f"its frontend is {kernel.frontend}", "a kernel of the Helion frontend")
    lists = {f"{key}s": [value] for key, value in config.items() if key in helion_adapter.SHORT}
    return encode({**{k: v for k, v in config.items() if k not in helion_adapter.SHORT}, **lists}, kernel.helion.blocks)
