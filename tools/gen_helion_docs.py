"""Writes docs/helion.md's table of Helion's own example tests, from docs/helion_examples.json.

python tools/helion_example.py CHECKOUT OUT v5e,v6e,v7x      runs the tests (an hour); see there
python tools/gen_helion_docs.py --collect CHECKOUT OUT       puts what came of them into docs/helion_examples.json
python tools/gen_helion_docs.py                              writes the table
python tools/gen_helion_docs.py --check                      exits with 1 if it is not current
"""

import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PATH = DOCS / "helion_examples.json", DOCS / "helion.md"
MARK = "<!-- What follows is written by tools/gen_helion_docs.py. -->\n"
CHIPS = ("v5e", "v6e", "v7x")
STATES = {
    "passed": "passes",
    "refused": "Helion's Pallas backend refuses the kernel",
    "wrong": "results differ from what the test expects",
    "failed": "fails here",
    "skipped": "Helion skips it",
    "not run": "not run yet",
}


def collect(checkout: Path, folder: Path) -> None:
    """Puts the records of a run into the data."""
    source = (checkout / "test" / "test_examples.py").read_text()
    every = dict.fromkeys(re.findall(r"^    def (test_\w+)\(", source, re.MULTILINE))
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    none: dict[str, Any] = {"state": "not run", "message": "", "kernels": [], "compiled": []}
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    data = {
        "commit": commit.strip(),
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("helion", "torch", "jax", "libtpu")},
        "tests": [{**none, "test": name, **found.get(name, {})} for name in sorted({*every, *found})],
    }
    DATA.write_text(json.dumps(data, indent=1).replace(str(checkout.resolve()) + "/", "") + "\n")


def on_chips(record: dict[str, Any]) -> list[str]:
    """Returns a cell for each chip: yes if all kernels of the test compile, no if one does not, nothing if none was tried."""
    cells = []
    for chip in CHIPS:
        errors = [c["error"] for c in record["compiled"] if c["chip"] == chip]
        cells.append("" if not errors else "no" if any(errors) else "yes")
    return cells


def note(record: dict[str, Any]) -> str:
    """Returns the message of a test, or of the first compile that failed, in one cell."""
    errors = [c["error"] for c in record["compiled"] if c["error"]]
    text = record["message"] or (errors[0] if errors else "")
    text = re.sub(r"\S*/(?=[\w.]+\.py)", "", text).replace("|", "\\|")
    return text if len(text) <= 200 else f"{text[:200]}..."


def document(data: dict[str, Any]) -> str:
    """Returns the part of docs/helion.md that is generated."""
    tests, versions = data["tests"], data["versions"]
    states = Counter(t["state"] for t in tests)
    tried = {chip: Counter(bool(c["error"]) for t in tests for c in t["compiled"] if c["chip"] == chip) for chip in CHIPS}
    lines = [
        "",
        "## Helion's own examples",
        "",
        f"The {len(tests)} tests of Helion's `test/test_examples.py` at commit {data['commit'][:10]}, unmodified, each",
        "in a process of its own, 120 s at most: the kernel runs as tpukern runs it, in interpret form on the CPU, and the",
        "test's own comparison judges. Half-precision is bfloat16 and int64 is int32, as on a TPU; flattened loops are left",
        "out. Then each kernel is compiled at the shapes and the config of the test. What took too long did so on a machine",
        "with much other work, most of it in small blocks.",
        "",
        *(f"- {states[state]}: {words}." for state, words in STATES.items() if states[state]),
        *(f"- {chip}: {tried[chip][False]} of {tried[chip].total()} kernels tried compile." for chip in CHIPS),
        "",
        f"Run on {data['date']} with {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
        f"| test | outcome | {' | '.join(CHIPS)} | said |",
        f"|---|---|{'---|' * len(CHIPS)}---|",
        *(f"| {t['test']} | {t['state']} | {' | '.join(on_chips(t))} | {note(t)} |" for t in tests if t["state"] != "not run"),
    ]
    waiting = [t["test"] for t in tests if t["state"] == "not run"]
    lines += ["", f"Not run yet: {', '.join(waiting)}."] if waiting else []
    return "\n".join(lines) + "\n"


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["--collect"]:
        collect(Path(words[1]), Path(words[2]))
    written, _, _ = PATH.read_text().partition(MARK)
    text = f"{written.rstrip()}\n\n{MARK}{document(json.loads(DATA.read_text()))}"
    if words == ["--check"]:
        if PATH.read_text() == text:
            return 0
        print(f"{PATH.name} is not what {DATA.name} says; run: python tools/gen_helion_docs.py", file=sys.stderr)
        return 1
    PATH.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
