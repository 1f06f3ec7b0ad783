"""How the verifier is judged: mutants of every kernel that ships, and which of them the default verdict catches.

    python benchmarks/mutants.py [--limit 40] [--seed 0] [--kernel NAME]... [--json FILE]

Two worker processes take mutants in turn. Prints how many of each kind were caught by kernel, what caught them, the rates, and
every survivor with how its results differ. "Refused" are mutants that do not even trace: rates are given without and with them.
"""

import argparse
import functools
import json
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tpukern import kernels
from tpukern.cli.names import shipped
from tpukern.testing.faults import Fault
from tpukern.testing.judging import References
from tpukern.testing.mutation import CAUGHT, EQUIVALENT, REFUSED, SURVIVED, Outcome, Report, faults, judge
from tpukern.testing.verdict import EXAMPLES


def one(name: str, place: int, limit: int | None, seed: int) -> Outcome:
    kernel = getattr(kernels, name)
    fault = _faults(name, limit, seed)[place]
    return judge(kernel, fault, seed=seed, references=_references(name))


@functools.cache
def _faults(name: str, limit: int | None, seed: int) -> list[Fault]:
    return faults(getattr(kernels, name), seed=seed, limit=limit)


@functools.lru_cache(maxsize=1)
def _references(name: str) -> References:
    return References()


def table(report: Report) -> list[str]:
    """Returns the table of kinds by kernels: caught of those that run and differ."""
    names = list(dict.fromkeys(o.kernel for o in report.outcomes))
    wide = max(len(kind) for kind in report.kinds)
    lines = [" " * wide + "".join(f"  {name:>15}" for name in (*names, "all", "refused", "equivalent"))]
    for kind in report.kinds:
        here = [o for o in report.outcomes if o.fault.kind == kind]
        cells = []
        for group in (*([o for o in here if o.kernel == name] for name in names), here):
            counts = Counter(o.state for o in group)
            asked = counts[CAUGHT] + counts[SURVIVED]
            cells.append(f"{counts[CAUGHT]}/{asked}" if asked else "-")
        counts = Counter(o.state for o in here)
        cells += [str(counts[REFUSED]), str(counts[EQUIVALENT])]
        lines.append(f"{kind:<{wide}}" + "".join(f"  {cell:>15}" for cell in cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=40, help="mutants a kernel at most; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel", action="append", choices=list(shipped()), help="this kernel only; can be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    limit, began = args.limit or None, time.monotonic()
    jobs = [
        (name, place)
        for name in args.kernel or shipped()
        for place in range(len(faults(getattr(kernels, name), seed=args.seed, limit=limit)))
    ]
    outcomes: list[Outcome] = []
    spawn: Any = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=60) as pool:
        for future in [pool.submit(one, name, place, limit, args.seed) for name, place in jobs]:
            outcome = future.result()
            outcomes.append(outcome)
            by = f" by {outcome.property}" if outcome.property else ""
            became = f"{outcome.state}{by}, {outcome.seconds:.1f} s"
            print(f"{len(outcomes)}/{len(jobs)} {outcome.kernel}: {outcome.fault}: {became}", flush=True)
    report = Report(outcomes=tuple(outcomes), examples=EXAMPLES, seed=args.seed)
    print("\ncaught, of those that run and are not equivalent\n", *table(report), sep="\n")
    print("\ncaught by", ", ".join(f"{name} {count}" for name, count in report.by_property.items()))
    for o in report.of(SURVIVED):
        print(f"\nsurvived in {o.kernel}: {o.fault}\n    {o.what}")
    counts = ", ".join(f"{len(report.of(state))} {state}" for state in (CAUGHT, REFUSED, EQUIVALENT, SURVIVED))
    print(f"\n{len(outcomes)} mutants of {len(report.kinds)} kinds, seed {args.seed}, {EXAMPLES} examples each: {counts}")
    print(f"caught {report.rate:.1%}; {report.rate_with_refused:.1%} with refused ones")
    print(f"{time.monotonic() - began:.0f} s in 2 processes")
    if args.json:
        args.json.write_text(json.dumps(report.json(), indent=1) + "\n")


if __name__ == "__main__":
    main()
