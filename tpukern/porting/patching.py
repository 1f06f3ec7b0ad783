"""The mechanical edits of a report as one patch."""

import difflib
import itertools

from tpukern.porting.reading import Edit, Report, decoded


def patch(report: Report) -> bytes:
    """Returns a unified diff that `git apply` takes in the report's folder, empty if there is nothing to edit.

    Each file's lines are in its own encoding.
    """
    parts = []
    edited = (f for f in report.findings if f.edit is not None)
    for path, findings in itertools.groupby(edited, key=lambda f: f.path):
        text, encoding = decoded((report.root / path).read_bytes())
        old, new = text, _edited(text, [f.edit for f in findings if f.edit is not None])
        if encoding == "utf-8-sig":  # the mark is no part of the text, but of the file
            old, new, encoding = f"\ufeff{old}", f"\ufeff{new}", "utf-8"
        lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{path}", f"b/{path}")
        whole = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
        parts += [line.encode("utf-8" if line.startswith(("--- ", "+++ ")) else encoding) for line in whole]
    return b"".join(parts)


def _edited(text: str, edits: list[Edit]) -> str:
    data = text.encode()
    for edit in sorted(edits, key=lambda e: e.start, reverse=True):
        data = data[: edit.start] + edit.text.encode() + data[edit.stop :]
    return data.decode()


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
