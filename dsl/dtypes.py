"""Names of element types: the one form in which jax, numpy and torch dtypes meet."""

from typing import Any, Final

_BYTES: Final = {
    1: "bool int4 uint4 int8 uint8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e4m3b11fnuz",
    2: "bfloat16 float16 int16 uint16",
    4: "float32 int32 uint32",
    8: "float64 int64 uint64",
}
ITEM_BYTES: Final = {name: size for size, names in _BYTES.items() for name in names.split()}
KNOWN: Final = tuple(ITEM_BYTES)


def name(dtype: Any) -> str:
    """Returns the name of a jax, numpy or torch dtype: `bfloat16`."""
    found = getattr(dtype, "name", None)
    return found if isinstance(found, str) else str(dtype).rpartition(".")[2]


def is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint")) or dtype == "bool"


def item_bytes(dtype: str) -> int:
    """Returns the bytes of one element in VMEM (a 4-bit type counts as one)."""
    return ITEM_BYTES[dtype]
