"""Operands as text: `"x: *r d, sizes: e int32 table -> y: *r d, lse: r float32 saved"`."""

from typing import Final

from tpukern.dsl import dims as d
from tpukern.dsl import dtypes
from tpukern.dsl.declaration import Parameter
from tpukern.dsl.roles import Input, Output, Table
from tpukern.errors import SignatureError

RULE: Final = '"x: *r d, sizes: e int32 table -> y: *r d, lse: r float32 saved"'
_MARKS: Final = {True: "table", False: "saved"}  # of inputs, of outputs


def read(kernel: str, text: str, *, inputs: bool) -> tuple[Parameter, ...]:
    """Reads one side of a signature.

    Args:
        kernel: Whose, for the error.
        text: `name: dims [dtype] [mark]`, separated by commas; the mark is `table` for inputs, `saved` for outputs.
        inputs: Whether it is the left side.

    Raises:
        SignatureError: It cannot be read, or a name is there twice.
    """
    found: dict[str, Parameter] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, rest = (piece.strip() for piece in part.partition(":"))
        if not colon or not name.isidentifier() or name in found:
            raise SignatureError(kernel, f"cannot read {part!r} in its signature", RULE)
        words = rest.split()
        marked = bool(words) and words[-1] == _MARKS[inputs]
        words = words[:-1] if marked else words
        dtype = words.pop() if words and words[-1] in dtypes.KNOWN else None
        dims = " ".join(words)
        role: Input | Output | Table
        if not inputs:
            role = Output(dims, dtype, None, None, marked)
        else:
            role = Table(dims, dtype or "int32") if marked else Input(dims, dtype, 0)
        found[name] = Parameter(name, role, d.parse(dims, kernel))
    return tuple(found.values())
