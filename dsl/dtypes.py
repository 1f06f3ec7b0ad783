"""Names of element types: the one form in which jax, numpy and torch dtypes meet."""

from typing import Any, Final

ITEM_BYTES: Final = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int4": 1, "uint4": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2,
    "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e4m3b11fnuz": 1,
}  # fmt: skip
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
