"""libtpu's schedule as text, read into bundles of scalar operations.

A TPU core runs one VLIW bundle a cycle. libtpu writes the final schedule of every compiled operation, with all latencies as
empty bundles, in the pass `packed-bundles-post-ra`. What a replay needs of it is the scalar program: branches, scalar
arithmetic, scalar memory, DMAs and waits for them. Vector operations count as part of their bundle, no more.

Read with libtpu 0.0.51. What is not understood raises `Unread`: a schedule is read whole or not at all.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Final

TESTED_LIBTPU: Final = ("0.0.51",)

# Bundles after a branch that run whether it is taken or not.
DELAY_SLOTS: Final = {"v4": 1, "v5e": 4, "v5p": 4, "v6e": 4, "v7x": 6}


CORE_ID: Final = "megacore core id"  # what the compiler notes at the load that tells the two cores of a chip apart


class Unread(Exception):
    """A part of a schedule, or of its run, that the replay does not understand."""


@dataclasses.dataclass(frozen=True)
class Name:
    """A value in a register: the compiler's own number for it, and the register's name (`s12`, `p3`)."""

    text: str

    @property
    def register(self) -> str:
        return self.text.rpartition("_")[2]


@dataclasses.dataclass(frozen=True)
class Symbol:
    """An address that the compiler allotted: `[#allocation5 + $0x1]`."""

    name: str
    offset: int = 0


Operand = Name | Symbol | int


@dataclasses.dataclass(frozen=True)
class Predicate:
    """A condition on an operation."""

    name: Name
    negated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One scalar operation.

    Attributes:
        code: Its name, as `sadd.s32`.
        result: The register written, or None.
        predicate: It happens only if this holds.
        old: For a predicated move, the value that the result has otherwise.
        operands: What it takes, in order.
        address: Operands whose sum is the address in scalar memory, for `sld` and `sst`.
        target: Bundle number, for a branch.
        note: What only a comment or number says: the direction of `dma.general`; of a division its number, then what it
            gives; of an `spop` the number of what it pops; `CORE_ID` at the load of that.
    """

    code: str
    result: Name | None = None
    predicate: Predicate | None = None
    old: Name | None = None
    operands: tuple[Operand, ...] = ()
    address: tuple[Operand, ...] = ()
    target: int | None = None
    note: str = ""

    def reads(self) -> Iterator[Name]:
        """Yields the registers read."""
        if self.predicate is not None:
            yield self.predicate.name
        for operand in (*self.operands, *self.address):
            if isinstance(operand, Name):
                yield operand


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule of one compiled operation.

    Attributes:
        name: The operation's name in the compiled program.
        bundles: For each bundle its scalar operations, in the order written.
    """

    name: str
    bundles: tuple[tuple[Operation, ...], ...]


_COMMENT: Final = re.compile(r"/\*(.*?)\*/", re.DOTALL)
_KEPT: Final = re.compile(r"\s*((?:hbm|vmem|smem|cmem)-to-\w+(?=\s*$)|kDivAndRem|kDiv|kRem|megacore core id)")
_BUNDLE: Final = re.compile(r"\s*(0x[0-9a-f]+|\d+)\s*(?:[A-Z]{2})?\s*:\s*(?:>\s*)*\{(.*)\}\s*$")
_LEGEND: Final = re.compile(r"\s*(= control target key|[A-Z]{2}: |$)")
_SLOT: Final = re.compile(r"(%?[\w.]+) = ([\w.\-]+)\s*(.*)$", re.DOTALL)
_PREDICATE: Final = re.compile(r"\((!?)%(p\d+_p\d+)\)\s*,?\s*")
_MOVE: Final = re.compile(r"\((!?)%(p\d+_p\d+), %(s\d+_s\d+)\)\s*,\s*")
_ATTRIBUTE: Final = re.compile(r"\[(?:thread:\$\d+|resolvable:\$\w+)\]\s*")
_SMEM: Final = re.compile(r"\[smem:\[(.*?)\](?: sm:\S+)?\](?:\s*,)?\s*")
_SYMBOL: Final = re.compile(r"\[?#(\w+)(?: \+ \$(0x[0-9a-f]+))?\]?$")
_TARGET: Final = re.compile(r"target bundleno = (\d+)")
_CALL: Final = re.compile(r"= inlined_call\b[^/;]*/\* %(\S+) = ")
_VMEM_INPUT: Final = re.compile(r"inlined_call_operand\.vmem \[shape: [^;{}]*kind: input")

_NOTES: Final = (CORE_ID, "kDivAndRem")
_COUNTED: Final = ("compiler", "vtrace", "sfence", "sphi", "pphi", "inlined_call")


def read(name: str, text: str) -> Schedule:
    """Reads the text of one `packed-bundles-post-ra` file.

    Raises:
        Unread: A line or operand has an unknown form.
    """
    plain = _COMMENT.sub(lambda c: f" @{kept[1]} " if (kept := _KEPT.match(c[1])) else " ", text)
    exchanged = _exchanged(plain)
    bundles: list[tuple[Operation, ...]] = []
    for line in plain.splitlines():
        found = _BUNDLE.match(line)
        if found is None:
            if _LEGEND.match(line):
                continue
            raise Unread(f"the line {line.strip()[:80]!r}")
        if int(found[1], 0) != len(bundles):
            raise Unread(f"bundle {found[1]} where {len(bundles):#x} was expected")
        bundles.append(tuple(_operations(found[2], exchanged)))
    if not bundles:
        raise Unread("no bundles")
    return Schedule(name, tuple(bundles))


def operations(text: str) -> tuple[str, ...]:
    """Returns the names of the operations that a program runs, from its schedule, in order."""
    return tuple(_CALL.findall(text))


def operands_in_vmem(text: str) -> int:
    """Returns how many of an operation's inputs lie in VMEM when it starts, from its schedule."""
    return len(_VMEM_INPUT.findall(text))


def _exchanged(text: str) -> dict[str, int]:
    """Returns what the two cores of a chip tell each other, by the number of the operation that hands it to the scalar core.

    Both push the same constant, and check that it is the other's.
    """
    sent = re.findall(r"= vpush\.ccrf %(\w+)", text)
    constants = dict(re.findall(r"%(\w+) = vmov (\d+)", text))
    values = {int(constants[name]) for name in sent if name in constants}
    received = set(re.findall(r"%(\w+) = vpop\.ccrf", text))
    if len(values) != 1:
        return {}
    return {number: signed(*values) for number, name in re.findall(r"%(\w+) = vpush %(\w+)", text) if name in received}


def _operations(text: str, exchanged: Mapping[str, int]) -> Iterator[Operation]:
    for slot in text.split(";;"):
        if not (slot := slot.strip()):
            continue
        found = _SLOT.match(slot)
        if found is None:
            raise Unread(f"the slot {slot[:80]!r}")
        result, code, rest = found.groups()
        if code == "spop" and (value := exchanged.get(rest.strip(" %"))) is not None:
            yield Operation(code="smov.u32", result=Name(result[1:]), operands=(value,))
        elif not _is_vector(code):
            yield _operation(code, result, rest.strip())


def _is_vector(code: str) -> bool:
    """Whether an operation belongs to the vector units; those that meet scalars and DMAs do not."""
    return (code.startswith("v") and not code.startswith(("vsync", "vtrace"))) or code in ("cld", "cst")


def _operation(code: str, result: str, rest: str) -> Operation:
    written = Name(result[1:]) if result.startswith("%") else None
    note = ""
    if "@" in rest:
        rest, _, after = rest.partition("@")
        note = next(word for word in (*_NOTES, after.split()[0]) if after.startswith(word))
        rest += after.removeprefix(note)
    if code in ("sphi", "pphi"):
        sources = tuple(Name(word[1:]) for word in re.findall(r"%\w+", rest))
        return Operation(code=code, result=written, operands=sources)
    if code.startswith("inlined_call_operand"):
        return Operation(code="operand" if "<no memory space>" not in code + rest else "scalar_operand", result=written)
    if code.startswith(_COUNTED):
        return Operation(code=code)
    if code.startswith("spop"):
        return Operation(code=code, result=written, note=rest.strip(" %"))
    predicate, old, rest = _condition(_ATTRIBUTE.sub("", rest))
    if code.startswith("sbr"):
        at = _TARGET.search(rest)
        if code != "sbr.rel" or at is None:
            raise Unread(f"the branch {code} {rest[:60]!r}")
        return Operation(code=code, predicate=predicate, target=int(at[1]))
    address: tuple[Operand, ...] = ()
    if code in ("sld", "sst"):
        place = _SMEM.match(rest)
        if place is None:
            raise Unread(f"the address in {code} {rest[:60]!r}")
        address = _address(place[1])
        late, _, rest = _condition(rest[place.end() :])
        predicate = predicate or late
    if code.startswith("scalar_lea"):  # a last symbol in brackets names what the address lies in
        rest = re.sub(r"(?<=\w) +\[#\w+\]$", "", rest.strip())
    if code.startswith("sdivrem"):
        note = f"{result.removeprefix('%')} {note}"
    return Operation(
        code=code, result=written, predicate=predicate, old=old, operands=tuple(_operands(rest)), address=address, note=note
    )


def _condition(rest: str) -> tuple[Predicate | None, Name | None, str]:
    if found := _MOVE.match(rest):
        return Predicate(Name(found[2]), bool(found[1])), Name(found[3]), rest[found.end() :]
    if found := _PREDICATE.match(rest):
        return Predicate(Name(found[2]), bool(found[1])), None, rest[found.end() :]
    return None, None, rest


def _address(text: str) -> tuple[Operand, ...]:
    if text.startswith("#") and "%" not in text:
        return (_symbol(text),)
    return tuple(_operand(part) for part in text.split(" + "))


def _operands(rest: str) -> Iterator[Operand]:
    for part in rest.split(","):
        if part := part.strip():
            yield _operand(part)


def _operand(text: str) -> Operand:
    text = text.strip()
    if text.startswith("%"):
        return Name(text[1:])
    if text.startswith(("#", "[#")):
        return _symbol(text)
    if found := re.fullmatch(r"\$?(0x[0-9a-f]+|-?\d+)", text):
        return signed(int(found[1], 0))
    raise Unread(f"the operand {text[:60]!r}")


def _symbol(text: str) -> Symbol:
    found = _SYMBOL.match(text)
    if found is None:
        raise Unread(f"the address {text[:60]!r}")
    return Symbol(found[1], int(found[2] or "0", 0))


def signed(value: int) -> int:
    """Returns a 32-bit pattern as a signed number."""
    return (value + 0x80000000 & 0xFFFFFFFF) - 0x80000000
