"""Measures the largest errors of the shipped kernels, and writes them beside their bounds.

python tools/gen_tolerances.py --measure [KERNEL...] [--examples N]   verifies 2,000 examples of each, into docs/tolerances.json
python tools/gen_tolerances.py --take FILE...   takes over what `tpukern verify KERNEL --examples N --json` wrote
python tools/gen_tolerances.py                  writes docs/tolerances.md from docs/tolerances.json
python tools/gen_tolerances.py --check          exits with 1 if it is not current, or a bound too wide or too narrow

Measuring takes minutes to half an hour a kernel on two cores. A kernel that was not measured is listed as such.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PATH = DOCS / "tolerances.json", DOCS / "tolerances.md"
EXAMPLES, SEED, WIDE = 2000, 0, 4
MISSING = "Not measured yet: "
VERSIONS = ("tpukern", "jax", "jaxlib", "torch", "numpy", "hypothesis")

HEAD = """\
<!-- Written by tools/gen_tolerances.py from tolerances.json; a test compares them. -->

# How far the shipped kernels err

The largest errors over the drawn inputs of each kernel (how many: see the second table; what is meant is {examples:,}), in the
chip's arithmetic, in the units that [verify.md](verify.md) defines; beside them the bound, which is the kernel's `tolerance=`,
and the largest error of ATen in the same dtype on some of the same inputs. A bound holds for every result of its dtype that has
no bound of its own, so it is compared with the worst of them: it may be {wide} times that, no more. The last column is that
ratio. What float32 adds to ATen's error is mostly the TPU's exponential, right to 18 bits.

| kernel | dtype | result | worst, ULP | ATen's, ULP | bound | bound / worst of the dtype |
|---|---|---|---|---|---|---|
"""


def measure(names: list[str], examples: int) -> None:
    """Verifies kernels, and puts what was measured into the data in place of what is there of them."""
    from tpukern import kernels
    from tpukern.testing import parity

    for name in names or kernels.__all__:
        verdict = parity(getattr(kernels, name), examples=examples, seed=SEED)
        verdict.check()
        keep(verdict.json(), datetime.date.today())


def keep(verdict: dict[str, Any], date: datetime.date) -> None:
    """Puts one verdict, as JSON has it, into the data."""
    if not verdict["ok"]:
        raise SystemExit(f"{verdict['kernel']}: something was found; expected a kernel that is right")
    versions = {package: importlib.metadata.version(package) for package in VERSIONS}
    record = {
        "examples": verdict["examples"],
        "seed": verdict["seed"],
        "seconds": round(verdict["seconds"]),
        "date": date.isoformat(),
        "versions": {"python": platform.python_version(), **versions},
        "worst": verdict["worst"],
    }
    known = json.loads(DATA.read_text())["kernels"] if DATA.is_file() else {}
    data = {"kernels": dict(sorted({**known, verdict["kernel"]: record}.items()))}
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def document(data: dict[str, Any]) -> str:
    """Returns the text of docs/tolerances.md."""
    from tpukern import kernels

    lines = [HEAD.format(examples=EXAMPLES, wide=WIDE).rstrip("\n")]
    for name, record in sorted(data["kernels"].items()):
        ratios = {(dtype, bound): bound / worst for dtype, bound, worst in shared(record)}
        for w in sorted(record["worst"], key=lambda w: (w["dtype"] != "float32", w["direction"] != "forward", w["output"])):
            aten = "" if w["aten_ulps"] is None else f"{w['aten_ulps']:.2f}"
            ratio = ratios.pop((w["dtype"], w["bound"]), None)
            cells = (f"`{name}`", w["dtype"], w["output"], f"{w['ulps']:.2f}", aten, f"{w['bound']:g}")
            lines.append(f"| {' | '.join(cells)} | {'' if ratio is None else f'{ratio:.1f}'} |")
    missing = [f"`{name}`" for name in sorted(kernels.__all__) if name not in data["kernels"]]
    if missing:
        lines += ["", f"{MISSING}{', '.join(missing)}."]
    lines += ["", "## Of which run", "", "| kernel | examples | seed | date | seconds | versions |", f"|{'---|' * 6}"]
    for name, record in sorted(data["kernels"].items()):
        versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        run = f"{record['examples']:,} | {record['seed']} | {record['date']} | {record['seconds']}"
        lines.append(f"| `{name}` | {run} | {versions} |")
    return "\n".join(lines) + "\n"


def but_the_missing(text: str) -> list[str]:
    """Returns the lines of the document that a kernel which is added, and not yet measured, leaves as they are."""
    return [line for line in text.splitlines() if line and not line.startswith(MISSING)]


def shared(record: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yields each dtype and bound, and the worst error that it bounds."""
    for dtype, bound in dict.fromkeys((w["dtype"], w["bound"]) for w in record["worst"]):
        yield dtype, bound, max(w["ulps"] for w in record["worst"] if (w["dtype"], w["bound"]) == (dtype, bound))


def faults(data: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong: kernels that there are not, and bounds that are not those of the kernels or do not fit."""
    from tpukern import kernels

    for name, record in data["kernels"].items():
        if name not in kernels.__all__:
            yield f"{name}: measured, but there is no such kernel"
            continue
        tolerance = getattr(kernels, name).tolerance
        for w in record["worst"]:
            names = (f"{w['output']} {w['dtype']}", w["output"], w["dtype"])
            now = next(tolerance[name] for name in names if name in tolerance)
            if now != w["bound"]:
                before = f"{w['output']} was measured beside a bound of {w['bound']:g} for {w['dtype']}"
                yield f"{name}: {before}, which is {now:g} now"
        for dtype, bound, worst in shared(record):
            if not worst <= bound <= WIDE * worst:
                yield f"{name}: the bound of {bound:g} for {dtype} is {bound / worst:.1f} times the worst; expected 1 to {WIDE}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", metavar="KERNEL")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--take", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure, args.examples)
    for path in args.take or ():
        for verdict in json.loads(path.read_text()):
            keep(verdict, datetime.date.fromtimestamp(path.stat().st_mtime))
    data = json.loads(DATA.read_text())
    text = document(data)
    if not args.check:
        PATH.write_text(text, encoding="utf-8")
        return 0
    found = list(faults(data))
    if not PATH.is_file() or but_the_missing(PATH.read_text(encoding="utf-8")) != but_the_missing(text):
        found.append(f"{PATH.name} is not what {DATA.name} says; run: python tools/gen_tolerances.py")
    print("".join(f"{fault}\n" for fault in found), end="", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
