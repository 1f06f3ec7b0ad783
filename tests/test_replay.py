"""The compiler's schedule: read, run against the memory model, and refused where it cannot be followed."""

import numpy as np
import pytest

from tpukern.autotune import bundles, chips, replay
from tpukern.autotune.bundles import Name, Predicate, Symbol, Unread

LEGEND = """= control target key start
LH: loop header
LB: loop body
PF: predicated region fallthrough
= control target key end

"""
V5E = chips.CHIPS["v5e"]

# A pipeline: each of ten turns starts a transfer of 1024 granules (32 KiB) into one of two flags and waits for it.
COPIES = """
     0   :  { %s9_s0 = inlined_call_operand.hbm [shape: bf16[1024,1024], index: 0, kind: input] /* a } ;; comment
over two lines */  ;;  %s1_s1 = smov.u32 0 }
   0x1   :  { %7 = vsyncpa [#allocation5], 0 }
   0x2   :  { %8 = vsyncpa [#allocation5 + $0x1], 0 }
   0x3 LB: > { %s2_s1 = sphi %s1_s1, %s3_s1  ;;  %v5_v0 = vmov 0.0  ;;  %s4_s2 = sand.u32 1, %s2_s1 }
   0x4   : > { %s5_s3 = scalar_lea.sflag [#allocation5], %s4_s2 }
   0x5   : > { %20 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s9_s0, /*size_in_granules=*/1024, /*vmem=*/[#allocation4], \
/*dst_syncflagno=*/%s5_s3 }
   0x6   : > { %21 = dma.done.wait %s5_s3, 1024 }
   0x7   : > { %22 = vsyncadd %s5_s3, 4294966272  ;;  %s3_s1 = sadd.s32 1, %s2_s1 }
   0x8   : > { %p1_p0 = scmp.ge.s32.totalorder %s3_s1, 10 }
   0x9   : > { %23 = sbr.rel (!%p1_p0) target bundleno = 3 (0x3), region = 4 }
   0xa   :  {}
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   :  { %24 = sst [smem:[#allocation1_spill]] %s3_s1 }
"""


def read(text: str) -> bundles.Schedule:
    return bundles.read("kernel", LEGEND + text.lstrip("\n"))


def program(*lines: str) -> bundles.Schedule:
    return read("\n".join(f"{at if at else 0} : {{ {line} }}" for at, line in enumerate(lines)))


def test_reading() -> None:
    schedule = read(COPIES)
    assert len(schedule.bundles) == 15
    first, copy, jump = schedule.bundles[0], schedule.bundles[5][0], schedule.bundles[9][0]
    assert [op.code for op in first] == ["operand", "smov.u32"]
    assert [op.code for op in schedule.bundles[3]] == ["sphi", "sand.u32"]  # the vector move only counts
    assert copy.operands == (Name("s9_s0"), 1024, Symbol("allocation4"), Name("s5_s3"))
    assert schedule.bundles[7][0].operands == (Name("s5_s3"), -1024)
    assert (jump.target, jump.predicate) == (3, Predicate(Name("p1_p0"), True))


def test_time_of_a_pipeline_without_overlap() -> None:
    found = replay.run(read(COPIES), V5E)
    a_turn = 3 * 32 * 1024 / (V5E.sustained_bytes_per_s / V5E.clock_hz) / 3 + V5E.dma_latency_s * V5E.clock_hz
    assert found.bundles == 3 + 10 * 11 + 1
    assert np.isclose(found.waits, 10 * (a_turn - 1))  # the wait stands one bundle after the start
    assert np.isclose(found.cycles, found.bundles + found.waits)
    assert (found.read_bytes, found.written_bytes, found.transfers) == (10 * 32 * 1024, 0, 10)


def test_one_server_for_reads_and_writes() -> None:
    memory = replay.Memory(V5E)
    memory.copy(0.0, "hbm_to_vmem", 1 << 15, 1)
    memory.copy(0.0, "vmem_to_hbm", 1 << 15, 2)
    each = (1 << 20) / memory.bytes_per_cycle
    assert np.isclose(memory.wait(0.0, 1, 1 << 15), each + memory.latency)
    assert np.isclose(memory.wait(0.0, 2, 1 << 15), 2 * each + memory.latency)
    assert (memory.read_bytes, memory.written_bytes) == (1 << 20, 1 << 20)


def test_operations_see_the_values_from_before_their_bundle() -> None:
    """One register gets a new value in the bundle that copies its old one, whichever is written first."""
    for pair in ("%s3_s3 = smov.u32 %s1_s1  ;;  %s4_s1 = smov.u32 7", "%s4_s1 = smov.u32 7  ;;  %s3_s3 = smov.u32 %s1_s1"):
        schedule = program(
            "%s1_s1 = smov.u32 5",
            pair,
            "%p1_p0 = scmp.eq.s32.totalorder %s3_s3, 5",
            "%9 = sbr.rel (%p1_p0) target bundleno = 16 (0x10), region = 1",
            *[""] * 16,
        )
        assert replay.run(schedule, V5E).bundles == 4 + 4 + 4


ARITHMETIC = [
    ("sadd.s32 %s1_s1, 2147483647", 5, -2147483644),
    ("ssub.s32 0, %s1_s1", 5, -5),
    ("smul.u32 %s1_s1, 2147483649", 3, -2147483645),
    ("sshll.u32 %s1_s1, 31", 1, -2147483648),
    ("sshrl.u32 %s1_s1, 28", -1, 15),
    ("sshra.s32 %s1_s1, 1", -3, -2),
    ("sxor.u32 %s1_s1, 4294967295", 5, -6),
    ("smin.s32 %s1_s1, 4294967295", 5, -1),
    ("sclz.u32 %s1_s1", 1, 31),
    ("scalar_select %p9_p9, %s1_s1, 8", 5, 5),
]


@pytest.mark.parametrize(("expression", "value", "want"), ARITHMETIC)
def test_scalar_arithmetic_is_the_machines(expression: str, value: int, want: int) -> None:
    schedule = program(
        f"%s1_s1 = smov.u32 {value & 0xFFFFFFFF}  ;;  %p9_p9 = scmp.eq.s32.totalorder 1, 1",
        f"%s2_s2 = {expression}",
        f"%p1_p1 = scmp.eq.s32.totalorder %s2_s2, {want & 0xFFFFFFFF}",
        "%9 = sbr.rel (%p1_p1) target bundleno = 16 (0x10), region = 1",
        *[""] * 16,
    )
    assert replay.run(schedule, V5E).bundles == 8 + 4  # four bundles, four delay slots, then the last four


def test_division_gives_quotient_then_remainder() -> None:
    schedule = program(
        "%s1_s1 = smov.u32 20",
        "%40 = sdivrem.u32 %s1_s1, 6 /* kDivAndRem */",
        "%s2_s2 = spop.drf %40",
        "%s3_s3 = spop.drf %40  ;;  %s4_s4 = sshll.u32 %s2_s2, 4",
        "%s5_s5 = sor.u32 %s3_s3, %s4_s4",
        "%p1_p1 = scmp.eq.s32.totalorder %s5_s5, 50",
        "%9 = sbr.rel (%p1_p1) target bundleno = 16 (0x10), region = 1",
        *[""] * 13,
    )
    assert replay.run(schedule, V5E).bundles == 7 + 4 + 4


REFUSED = [
    ("%9 = dma.done.wait [#allocation5], 8", "kernel: a wait for 8 granules of which 0 ever come"),
    ("%s2_s2 = sfrob.s32 1, 2  ;;  %8 = vsyncadd [#allocation5], %s2_s2", "kernel: the operation sfrob.s32"),
    ("%9 = sbr.ind target = %s1_s1", "the branch sbr.ind 'target = %s1_s1'"),
    ("%9 = dma.general %s1_s1, 8, %s2_s2, [#allocation5]", "kernel: the transfer dma.general ?_to_?"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_cannot_be_followed_gives_no_time(line: str, message: str) -> None:
    with pytest.raises(Unread) as refusal:
        replay.run(program(line), V5E)
    assert str(refusal.value) == message


def test_data_that_no_time_depends_on() -> None:
    line = "%9 = vpush %v1_v1  ;;  %s1_s1 = spop %9  ;;  %8 = vsyncadd [#allocation5], 1"
    assert replay.run(program(line), V5E).bundles == 1


def test_a_branch_on_data_is_refused() -> None:
    line = "%p1_p1 = scmp.eq.s32.totalorder %s1_s1, 0"
    jump = "%7 = sbr.rel (%p1_p1) target bundleno = 0 (0x0), region = 1"
    with pytest.raises(Unread, match="depends on data"):
        replay.run(program("%9 = vpush %v1_v1", "%s1_s1 = spop %9", line, jump, *[""] * 6), V5E)


def test_the_operations_of_a_program() -> None:
    text = """
     0   :  { %180 = inlined_call /* <late-initialization> */ }
   0x1   :  { %181 = inlined_call %s1_s1, %s2_s2 /* %reshape.1 = reshape(%x) */ }
   0x2   :  { %182 = inlined_call %s1_s1 /* %rms_norm.1 = custom-call(%x, %reshape.1) */ }
"""
    assert bundles.operations(text) == ("reshape.1", "rms_norm.1")


def test_two_cores_share_the_memory() -> None:
    """Each core copies unless its number is 1: then core 0 has the memory to itself; if both copy, each has half."""
    copy = "dma.hbm_to_vmem [#allocation7], 32768, [#allocation4], [#allocation5]"
    lines = (
        "%s1_s1 = sld [smem:[#allocation0]] /* megacore core id :: core id */",
        "%p1_p1 = scmp.ne.s32.totalorder %s1_s1, 0",
    )
    v5p = chips.CHIPS["v5p"]
    alone = replay.run(program(*lines[:2], f"%9 = {copy.replace(' ', ' (!%p1_p1), ', 1)}",
                               "%8 = dma.done.wait (!%p1_p1), [#allocation5], 32768"), v5p)  # fmt: skip
    both = replay.run(program(*lines[:2], f"%9 = {copy}", "%8 = dma.done.wait [#allocation5], 32768"), v5p)
    assert (alone.transfers, both.transfers) == (1, 2)
    assert np.isclose(both.busy, 2 * alone.busy)
