"""What tpukern's own metadata asks for, against what is installed; nothing is imported to find out."""

import dataclasses
import importlib.metadata
import re

REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+)\s*(?P<rule>[^;]*?)\s*(;\s*extra\s*==\s*["'](?P<extra>[\w-]+)["']\s*)?""")
RULE = re.compile(r"(?P<sign>==|>=|<=|!=|<|>)\s*(?P<version>[\w.]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirement:
    """One package that tpukern, or one of its extras, wants.

    Attributes:
        name: The package.
        rule: The versions that will do, e.g. ">=2.13,<2.16".
        extra: The extra that wants it; empty for tpukern itself.
        installed: The version found, or None.
    """

    name: str
    rule: str
    extra: str
    installed: str | None

    @property
    def met(self) -> bool:
        """Whether the installed version will do."""
        return self.installed is not None and satisfies(self.installed, self.rule)

    @property
    def pip_name(self) -> str:
        """The requirement as pip takes it."""
        return f"{self.name}{self.rule}"


def requirements() -> list[Requirement]:
    """Returns all requirements of the installed tpukern, in the order it declares them."""
    found = []
    for line in importlib.metadata.requires("tpukern") or []:
        match = REQUIREMENT.fullmatch(line)
        assert match, f"cannot read tpukern's own requirement {line!r}"
        name, extra = match["name"], match["extra"] or ""
        rule = ",".join(sorted(match["rule"].split(","), reverse=True))  # >= before <
        found.append(Requirement(name=name, rule=rule, extra=extra, installed=installed_version(name)))
    return found


def installed_version(name: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfies(version: str, rule: str) -> bool:
    """Whether a version meets rules such as ``>=2.13,<2.16`` or ``==0.0.51``; local parts (``+cpu``) do not count."""
    have = release(version)
    for match in RULE.finditer(rule):
        want = release(match["version"])
        width = max(len(have), len(want))
        a, b = (part + (0,) * (width - len(part)) for part in (have, want))
        if not {"==": a == b, "!=": a != b, ">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b}[match["sign"]]:
            return False
    return True


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers a version begins with: (2, 13, 0) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # type: ignore[index]
