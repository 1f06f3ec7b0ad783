"""A schedule, run: its scalar program exactly, its bundles counted, its DMAs played against a memory model.

The scalar program becomes one Python function; what only feeds addresses is left out of it. Time is counted in cycles: one a
bundle, plus what a wait for a DMA lasts. The memory is one server that reads and writes share, first come, first served:

    begin = max(now, server is free);   server is free at begin + bytes / bandwidth;   done then + latency

Clock, bandwidth and latency are the chip's (`chips`). What cannot be followed raises `Unread`: a condition that depends on
vector data, a wait that nothing satisfies, an operation of unknown meaning.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from tpukern.autotune.bundles import CORE_ID, DELAY_SLOTS, Name, Operand, Operation, Schedule, Symbol, Unread, signed
from tpukern.autotune.chips import Chip

MOST_TURNS: Final = 3_000_000  # jumps of one run: about a minute
_SPACES: Final = ("hbm", "vmem", "smem", "cmem")
_KINDS: Final = frozenset(f"{a}_to_{b}" for a in _SPACES for b in _SPACES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a replay found.

    Attributes:
        name: The operation.
        cycles: From its first bundle to its last.
        bundles: Cycles in which a bundle was issued.
        waits: Cycles spent waiting for DMAs.
        busy: Cycles in which the memory moved bytes.
        read_bytes: Bytes read from HBM.
        written_bytes: Bytes written to HBM.
        transfers: How many DMAs there were.
    """

    name: str
    cycles: float
    bundles: int
    waits: float
    busy: float
    read_bytes: int
    written_bytes: int
    transfers: int


class Memory:
    """HBM, the DMA engines and the flags that they count in.

    Args:
        chip: Whose.
        core: Which core of it runs.
        sharing: How many cores use the memory at once.
    """

    def __init__(self, chip: Chip, core: int = 0, sharing: int = 1) -> None:
        self.core = core
        self.bytes_per_cycle = chip.sustained_bytes_per_s / chip.clock_hz / sharing
        self.latency = chip.dma_latency_s * chip.clock_hz
        self.granule = chip.granule_bytes
        self.free = self.busy = self.waits = 0.0
        self.read_bytes = self.written_bytes = self.transfers = 0
        self.flags: dict[int, int] = {}
        self.coming: dict[int, deque[tuple[float, int]]] = {}

    def copy(self, now: float, kind: str, granules: int, flag: int) -> None:
        """Starts a DMA at a time; its granules are added to the flag when it is done."""
        size, done = granules * self.granule, now + self.latency
        self.transfers += 1
        if "hbm" in kind:
            takes = size / self.bytes_per_cycle
            self.free = max(now, self.free) + takes
            self.busy += takes
            done = self.free + self.latency
            if kind.startswith("hbm"):
                self.read_bytes += size
            if kind.endswith("hbm"):
                self.written_bytes += size
        self.coming.setdefault(flag, deque()).append((done, granules))

    def wait(self, now: float, flag: int, granules: int) -> float:
        """Returns when a flag has counted that far."""
        have, then = self.flags.get(flag, 0), now
        coming = self.coming.get(flag)
        while have < granules:
            if not coming:
                raise Unread(f"a wait for {granules} granules of which {have} ever come")
            done, more = coming.popleft()
            have, then = have + more, max(then, done)
        self.flags[flag] = have
        self.waits += then - now
        return then

    def add(self, flag: int, value: int) -> None:
        """Adds to a flag."""
        self.flags[flag] = self.flags.get(flag, 0) + value

    def set(self, flag: int, value: int) -> None:
        """Sets a flag."""
        self.flags[flag] = value


class _Unknown:
    """What nothing in the schedule tells: results of the vector units, scalar memory that nothing wrote. It can be moved."""

    def _refuse(self, *others: Any) -> Any:
        raise Unread("what it does depends on data: results of the vector units, or scalars that are given at run time")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __invert__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __index__ = __floordiv__ = __mod__ = _refuse
    __rfloordiv__ = __rmod__ = _refuse

    def __hash__(self) -> int:
        raise Unread("a value that nothing in the schedule tells")


_UNKNOWN: Final = _Unknown()


def run(schedule: Schedule, chip: Chip) -> Run:
    """Replays a schedule. Where the kernel splits its grid over two cores, both are run, each with half of the bandwidth.

    Raises:
        Unread: Something in it cannot be followed.
    """
    try:
        if not any(op.note == CORE_ID for bundle in schedule.bundles for op in bundle):
            return _one(schedule, chip, Memory(chip))
        first, second = (_one(schedule, chip, Memory(chip, core, sharing=2)) for core in (0, 1))
        if not second.transfers:
            return _one(schedule, chip, Memory(chip))
    except Unread as reason:
        raise Unread(str(reason) if str(reason).startswith(schedule.name) else f"{schedule.name}: {reason}") from reason
    longest = max(first, second, key=lambda r: r.cycles)
    return dataclasses.replace(
        longest,
        read_bytes=first.read_bytes + second.read_bytes,
        written_bytes=first.written_bytes + second.written_bytes,
        transfers=first.transfers + second.transfers,
    )


def _one(schedule: Schedule, chip: Chip, memory: Memory) -> Run:
    bundles, end = function_of(schedule, chip.name)(memory)
    return Run(
        name=schedule.name, cycles=end, bundles=bundles, waits=memory.waits, busy=memory.busy,
        read_bytes=memory.read_bytes, written_bytes=memory.written_bytes, transfers=memory.transfers,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def function_of(schedule: Schedule, target: str) -> Callable[[Memory], tuple[int, float]]:
    """Returns a schedule as a Python function: a memory to (bundles, cycles).

    Raises:
        Unread: Something in it is of unknown meaning.
    """
    text = _Writer(schedule, DELAY_SLOTS[target]).text()
    scope: dict[str, Any] = {"signed": signed, "Unread": Unread, "limit": MOST_TURNS, "unknown": _UNKNOWN}
    exec(compile(text, f"<replay of {schedule.name}>", "exec"), scope)
    function: Callable[[Memory], tuple[int, float]] = scope["run"]
    return function


# --- the scalar program as Python --------------------------------------------------------------------------------------

_EXPRESSIONS: Final = {
    "smov": "{0}",
    "pmov": "{0}",
    "sadd.s32": "signed({0} + {1})",
    "ssub.s32": "signed({0} - {1})",
    "smul.u32": "signed({0} * {1})",
    "sand.u32": "{0} & {1}",
    "sor.u32": "{0} | {1}",
    "sxor.u32": "{0} ^ {1}",
    "sshll.u32": "signed({0} << {1})",
    "sshrl.u32": "signed(({0} & 0xFFFFFFFF) >> {1})",
    "sshra.s32": "{0} >> {1}",
    "smin.s32": "min({0}, {1})",
    "smax.s32": "max({0}, {1})",
    "smin.u32": "signed(min({0} & 0xFFFFFFFF, {1} & 0xFFFFFFFF))",
    "smax.u32": "signed(max({0} & 0xFFFFFFFF, {1} & 0xFFFFFFFF))",
    "sneg.s32": "signed(-{0})",
    "snot.u32": "~{0}",
    "sclz.u32": "32 - ({0} & 0xFFFFFFFF).bit_length()",
    "sc.u32": "({0} & 0xFFFFFFFF) + ({1} & 0xFFFFFFFF) > 0xFFFFFFFF",
    "por": "{0} or {1}",
    "pand": "{0} and {1}",
    "pnor": "not ({0} or {1})",
    "pnand": "not ({0} and {1})",
    "pxor": "bool({0}) != bool({1})",
    "pneg": "not {0}",
    "scalar_select": "{1} if {0} else {2}",
}
_COMPARISONS: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SUMS: Final = ("scalar_lea", "int_to_ptr")
_EVENTS: Final = ("dma.", "vsync", "sbr", "sst", "sdivrem", "spop.drf")
_NOTHING: Final = ("compiler", "vtrace", "sfence", "sphi", "pphi", "inlined_call", "shalt.err")


class _Writer:
    """Writes the function for one schedule.

    Values that a phi joins live in one variable; so do the old and the new value of a predicated move.
    """

    def __init__(self, schedule: Schedule, delay: int) -> None:
        self.schedule, self.delay = schedule, delay
        self.parents: dict[Name, Name] = {}
        self.symbols: dict[str, int] = {}
        pointers = (op for op in self._all() if op.code.startswith(_SUMS))
        self.spaces: dict[Operand | None, str] = {op.result: op.code.partition(".")[2] for op in pointers}
        for op in self._all():
            if op.code in ("sphi", "pphi"):
                for source in op.operands:
                    assert isinstance(source, Name)
                    self._join(op.result, source)
            elif op.old is not None:
                self._join(op.result, op.old)
        self.needed = self._needed()

    def _all(self) -> Iterator[Operation]:
        for bundle in self.schedule.bundles:
            yield from bundle

    # Variables

    def _find(self, name: Name) -> Name:
        while (parent := self.parents.get(name, name)) != name:
            name = parent
        return name

    def _join(self, one: Name | None, other: Name) -> None:
        assert one is not None
        a, b = self._find(one), self._find(other)
        if a != b:
            self.parents[a] = b

    def _variable(self, name: Name) -> str:
        return self._find(name).text

    def _address(self, symbol: Symbol) -> int:
        """Returns an address of our own for what the compiler allotted: allocations lie far apart."""
        base = self.symbols.setdefault(symbol.name, (len(self.symbols) + 1) << 20)
        return base + symbol.offset

    def _needed(self) -> frozenset[Name]:
        """Returns the variables that branches, waits, DMAs and stores depend on."""
        feeding: dict[Name, set[Name]] = {}
        needed: set[Name] = set()
        for op in self._all():
            if op.code.startswith(_NOTHING):
                continue
            reads = {self._find(n) for n in self._read(op)}
            if op.code.startswith(_EVENTS):
                needed |= reads
            elif op.result is not None:
                feeding.setdefault(self._find(op.result), set()).update(reads)
        waiting = list(needed)
        while waiting:
            for more in feeding.get(waiting.pop(), set()) - needed:
                needed.add(more)
                waiting.append(more)
        return frozenset(needed)

    def _read(self, op: Operation) -> Iterator[Name]:
        """Yields what an operation reads as far as timing goes: of a DMA, its size and flag, not its addresses."""
        if not op.code.startswith("dma.") or op.code == "dma.done.wait":
            yield from op.reads()
            return
        if op.predicate is not None:
            yield op.predicate.name
        for operand in _size_and_flag(op):
            if isinstance(operand, Name):
                yield operand

    # Text

    def text(self) -> str:
        """Returns the source of the function."""
        starts = self._starts()
        lines = ["def run(memory):"]
        names = sorted({self._variable(n) for n in self.needed})
        lines += [f"    {name} = unknown" for name in names]
        lines += ["    copy, wait, add, put = memory.copy, memory.wait, memory.add, memory.set", "    smem, popped = {}, {}"]
        lines += ["    at, t, bundles, turns = 0, 0.0, 0, 0", "    while True:"]
        lines += ["        turns += 1", "        if turns > limit:"]
        lines += [f"            raise Unread({f'{self.schedule.name}: more than {MOST_TURNS:,} jumps'!r})"]
        ends = [*starts[1:], len(self.schedule.bundles)]
        self._tree(lines, list(zip(starts, ends, strict=True)), "        ")
        return "\n".join(lines) + "\n"

    def _starts(self) -> list[int]:
        starts, last = {0}, len(self.schedule.bundles)
        for at, bundle in enumerate(self.schedule.bundles):
            for op in bundle:
                if op.code == "sbr.rel":
                    assert op.target is not None
                    starts |= {op.target, at + 1 + self.delay}
        return sorted(s for s in starts if s < last)

    def _tree(self, lines: list[str], blocks: list[tuple[int, int]], indent: str) -> None:
        """Writes the blocks under a binary search for the one to run."""
        if len(blocks) == 1:
            self._block(lines, *blocks[0], indent)
            return
        half = len(blocks) // 2
        lines.append(f"{indent}if at < {blocks[half][0]}:")
        self._tree(lines, blocks[:half], indent + "    ")
        lines.append(f"{indent}else:")
        self._tree(lines, blocks[half:], indent + "    ")

    def _block(self, lines: list[str], start: int, end: int, indent: str) -> None:
        counted = start
        pending: list[tuple[int, int | None]] = []
        for at in range(start, end):
            ops = self._ordered(self.schedule.bundles[at])
            written = [line for op in ops for line in self._statement(op)]
            if any(op.code.startswith("dma.") for op in ops) and at > counted:
                lines.append(f"{indent}t += {at - counted}; bundles += {at - counted}")
                counted = at
            lines += [indent + line for line in written]
            for op in ops:
                if op.code == "sbr.rel":
                    lines.append(f"{indent}jump{len(pending)} = {self._condition(op) or 'True'}")
                    pending.append((at + self.delay, op.target))
        lines.append(f"{indent}t += {end - counted}; bundles += {end - counted}")
        if len(pending) > 1 or any(due != end - 1 for due, _ in pending):
            raise Unread(f"{self.schedule.name}: branches in each other's delay slots, before bundle {end}")
        after = f"at = {end}" if end < len(self.schedule.bundles) else "return bundles, t"
        if pending:
            lines += [f"{indent}if jump0:", f"{indent}    at = {pending[0][1]}", f"{indent}else:", f"{indent}    {after}"]
        else:
            lines.append(indent + after)

    def _ordered(self, bundle: tuple[Operation, ...]) -> list[Operation]:
        """Returns a bundle's operations in an order in which reads see what the hardware shows them.

        Reads see the values from before the bundle, except an operand that the bundle itself defines by the same name.
        """
        ops = [op for op in bundle if self._counts(op)]
        after: dict[int, set[int]] = {i: set() for i in range(len(ops))}
        for i, op in enumerate(ops):
            for name in self._read(op):
                for j, other in enumerate(ops):
                    if i == j or other.result is None or self._find(other.result) != self._find(name):
                        continue
                    first, second = (j, i) if other.result == name else (i, j)
                    after[second].add(first)
        order: list[int] = []
        while len(order) < len(ops):
            ready = [i for i in after if i not in order and after[i] <= set(order)]
            if not ready:
                raise Unread(f"{self.schedule.name}: a bundle that exchanges registers")
            order.append(ready[0])
        return [ops[i] for i in order]

    def _counts(self, op: Operation) -> bool:
        if op.code.startswith(_NOTHING):
            return False
        return op.code.startswith(_EVENTS) or op.result is None or self._find(op.result) in self.needed

    def _statement(self, op: Operation) -> list[str]:
        line = self._plain(op)
        condition = self._condition(op)
        if line is None or not condition:
            return [] if line is None else [line]
        return [f"if {condition}: {line}"]

    def _condition(self, op: Operation) -> str:
        if op.predicate is None:
            return ""
        name = self._variable(op.predicate.name)
        return f"not {name}" if op.predicate.negated else name

    def _plain(self, op: Operation) -> str | None:
        """Returns what an operation does when its predicate holds; None if branches do it."""
        code, values = op.code, [self._value(o) for o in op.operands]
        if code == "sbr.rel":
            return None
        if code == "dma.done.wait":
            return f"t = wait(t, {values[0]}, {values[1]})"
        if code.startswith("dma."):
            size, flag = (self._value(o) for o in _size_and_flag(op))
            return f"copy(t, {self._direction(op)!r}, {size}, {flag})"
        if code in ("vsyncadd", "vsyncpa"):
            return f"{'add' if code == 'vsyncadd' else 'put'}({values[0]}, {values[1]})"
        place = " + ".join(self._value(o) for o in op.address)
        if code == "sst":
            return f"smem[{place}] = {values[0]}"
        if code.startswith("sdivrem"):
            number, wanted = op.note.split()
            a, b = (f"({v} & 0xFFFFFFFF)" for v in values)
            parts = {"kDiv": f"{a} // {b}", "kRem": f"{a} % {b}"}
            both = [parts[w] for w in (("kDiv", "kRem") if wanted == "kDivAndRem" else (wanted,))]
            return f"popped[{number!r}] = [{', '.join(f'signed({part})' for part in both)}]"
        assert op.result is not None
        result = self._variable(op.result)
        if code == "spop.drf":
            return f"{result} = popped[{op.note!r}].pop(0)"
        if code == "sld":
            return f"{result} = {'memory.core' if op.note == CORE_ID else f'smem.get({place}, unknown)'}"
        return f"{result} = {self._expression(code, values)}"

    def _expression(self, code: str, values: list[str]) -> str:
        if code == "operand":  # an address, which no time depends on
            return "0"
        if code == "scalar_operand":
            return "unknown"
        if code.startswith("spop"):
            return "unknown"
        if code.startswith(_SUMS):
            return " + ".join(values)
        if code.startswith("scmp."):
            _, word, kind = code.split(".")[:3]
            mask = " & 0xFFFFFFFF" if kind == "u32" else ""
            return f"({values[0]}{mask}) {_COMPARISONS[word]} ({values[1]}{mask})"
        form = _EXPRESSIONS.get(code) or _EXPRESSIONS.get(code.split(".")[0])
        if form is None:
            raise Unread(f"{self.schedule.name}: the operation {code}")
        return form.format(*(f"({v})" if v.startswith("-") else v for v in values))

    def _direction(self, op: Operation) -> str:
        """Returns what a DMA moves between, as `hbm_to_vmem`: its name, a comment, or the kinds of its addresses tell."""
        kind = op.note.replace("-", "_") if op.code == "dma.general" else op.code.removeprefix("dma.")
        if not kind:
            kind = "_to_".join(self.spaces.get(at, "?") for at in (op.operands[0], op.operands[2]))
        if kind not in _KINDS:
            raise Unread(f"{self.schedule.name}: the transfer {op.code} {kind}")
        return kind

    def _value(self, operand: Operand) -> str:
        if isinstance(operand, Name):
            return self._variable(operand)
        return str(operand if isinstance(operand, int) else self._address(operand))


def _size_and_flag(op: Operation) -> tuple[Operand, Operand]:
    """Returns a DMA's size in granules, and the flag that it counts in."""
    if len(op.operands) < 4:
        raise Unread(f"the transfer {op.code} with {len(op.operands)} operands")
    return op.operands[1], op.operands[3]
