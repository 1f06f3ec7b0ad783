"""A config: block sizes, choices and grid order of one way to run a kernel."""

from typing import Any, final

from tpukern.dsl.frozen import FrozenMapping
from tpukern.errors import ConfigError


@final
class Config(FrozenMapping[Any]):
    """An immutable mapping such as `{"block_m": 512, "order": "m n k"}`.

    Keys of a kernel that another one calls are prefixed by its name: `flash_attention_dkv.block_i`.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> "Config":
        """Reads `block_m=512,order=m n k`, the form that `str` gives.

        Raises:
            ConfigError: A part is not `key=value`.
        """
        items: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not (key and equals and value):
                raise ConfigError("config", f"{part!r} in {text!r}", "key=value, separated by commas")
            if key in items:
                raise ConfigError("config", f"{key!r} twice in {text!r}", "each key once")
            items[key] = _value(value)
        return cls(items)

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.items())

    def within(self, kernel: str) -> "Config":
        """Returns the part that is for a kernel called by this one, without its prefix."""
        return Config({key[len(kernel) + 1 :]: value for key, value in self.items() if key.startswith(kernel + ".")})

    def prefixed(self, kernel: str) -> "Config":
        """Returns the config under the prefix that it has in a kernel that calls `kernel`."""
        return Config({f"{kernel}.{key}": value for key, value in self.items()})


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if text == "None":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
