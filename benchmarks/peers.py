"""Our kernels beside JAX's own and Tokamax's, on the same problem: compile time, VMEM, estimated time.

    python benchmarks/peers.py [--target v5e,v6e] [--workload attention] [--json]

Tokamax's are there if it is installed (`pip install tokamax`, best in an environment of its own). Everything is compiled and
estimated in one run; the ratio is a peer's over ours, or over the first of the table where we have no such kernel. Compile
seconds are wall time on this machine, two compiles at a time; times are predictions, with their source.
"""

import argparse
import json
from typing import Any, NamedTuple

import peer_kernels

import tpukern
from tpukern import CompileError, TpukernError
from tpukern.autotune.estimating import estimate_many
from tpukern.cli.names import find_targets
from tpukern.compiling import Job, compile_many
from tpukern.dsl import Kernel, Workload


class Peer(NamedTuple):
    """A kernel on a problem."""

    problem: str
    kernel: Kernel
    workload: Workload


def peers() -> tuple[list[Peer], str]:
    """Returns what is compared, ours first, and why Tokamax is not there (or an empty string)."""
    from tpukern.kernels import flash_attention

    ours = Workload("llama3_8b_4k", b=1, hk=8, g=4, i=4096, j=4096, d=128, e=128, causal=True)
    causal, grouped = "attention", "grouped matmul"
    found = [
        Peer(causal, flash_attention, ours),
        Peer(causal, peer_kernels.flash, peer_kernels.flash.workloads[0]),
        Peer(causal, peer_kernels.splash, peer_kernels.splash.workloads[0]),
        Peer(grouped, peer_kernels.gmm, peer_kernels.gmm.workloads[0]),
        Peer("paged attention", peer_kernels.paged, peer_kernels.paged.workloads[0]),
    ]
    try:
        import tokamax_kernels as theirs
    except ImportError as error:
        return found, f"Tokamax is left out: {error}"
    more = ((causal, theirs.tokamax_attention), (grouped, theirs.tokamax_ragged_dot), ("loss", theirs.tokamax_cross_entropy))
    return [*found, *(Peer(problem, kernel, kernel.workloads[0]) for problem, kernel in more)], ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Our kernels beside JAX's own and Tokamax's.")
    parser.add_argument("--target", default="v5e,v6e,v7x", help="chips, separated by commas")
    parser.add_argument("--workload", help="only the problems whose name begins so")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    targets = find_targets(options.target)
    compared, missing = peers()
    compared = [p for p in compared if p.problem.startswith(options.workload or "")]
    if not compared:
        parser.error(f"no problem begins with {options.workload!r}: {', '.join(dict.fromkeys(p.problem for p in peers()[0]))}")
    rows: list[dict[str, Any]] = []
    if not options.json:
        print("".join(f"{title:<{width}}" for title, width in COLUMNS), flush=True)
    for target in targets:
        found = rows_of(compared, target)
        with_ratios(found)
        rows += found
        for row in found if not options.json else ():
            print("".join(f"{cell(row, title):<{width}}" for title, width in COLUMNS) + (row["why"] or ""), flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "notes": [missing] if missing else []}, indent=2))
    elif missing:
        print(missing)


COLUMNS = (
    ("problem", 17), ("target", 8), ("kernel", 24), ("compile s", 11), ("VMEM MiB", 10), ("us", 11), ("source", 10),
    ("ratio", 8),
)  # fmt: skip


def cell(row: dict[str, Any], title: str) -> str:
    value = row[title]
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def rows_of(compared: list[Peer], target: tpukern.Target) -> list[dict[str, Any]]:
    """Compiles and estimates every kernel for one chip; one that is refused gets a row with the reason."""
    rows: list[dict[str, Any]] = []
    jobs: dict[int, Job] = {}
    for peer in compared:
        row: dict[str, Any] = dict.fromkeys((title for title, _ in COLUMNS), None)
        rows.append(row | {"problem": peer.problem, "target": target.name, "kernel": peer.kernel.name, "why": None})
        try:
            signature = peer.kernel.workload_signature(peer.workload)
            bound = peer.kernel.bind_signature(signature, target=target)
            jobs[len(rows) - 1] = Job(bound=bound, target=target, lowered=tpukern.lower(bound))
        except TpukernError as error:
            rows[-1]["why"] = str(error)
    compiled = compile_many(list(jobs.values()), use_cache=False)
    for place, one in zip(jobs, compiled, strict=True):
        rows[place]["why"] = one.error
        if one.ok:
            rows[place] |= {"compile s": one.seconds, "VMEM MiB": (one.vmem_bytes or 0) / 2**20}
    for place, found in zip(jobs, estimate_many(list(jobs.values())), strict=True):
        if isinstance(found, CompileError):
            continue
        if isinstance(found, TpukernError):
            rows[place]["why"] = str(found)
            continue
        rows[place] |= {"us": found.us, "source": found.source}
        if found.source != "replay":
            rows[place]["why"] = "; ".join(found.gaps)
    return rows


def with_ratios(rows: list[dict[str, Any]]) -> None:
    """Adds how much longer each kernel takes than the first of its problem, where both times are replays."""
    for row in rows:
        first = next(r for r in rows if (r["problem"], r["target"]) == (row["problem"], row["target"]))
        if row["source"] == first["source"] == "replay":
            row["ratio"] = row["us"] / first["us"]


if __name__ == "__main__":
    main()
