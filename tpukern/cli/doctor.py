"""``tpukern doctor``: what this machine has, what it lacks, and the commands that mend it."""

import dataclasses
import platform
import sys
from typing import Any

import click

from tpukern.cli.cache import cache_facts, used
from tpukern.cli.output import Output, json_option
from tpukern.cli.requirements import Requirement, requirements
from tpukern.version import __version__

PURPOSES = {  # extra -> what it is for
    "compile": "the TPU compiler",
    "tpu": "the tpu device on a TPU",
    "emulator": "the tpu device on a machine without a TPU",
    "helion": "kernels written in Helion",
    "test": "tpukern's own tests",
}
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI's torch is a CUDA build of several gigabytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Missing:
    """One thing that is not as it should be.

    Attributes:
        what: What was found.
        purpose: What it is needed for.
        mend: The command that mends it; empty if none does.
        required: Whether tpukern fails at one of its main tasks without it: `doctor` then exits with 1.
    """

    what: str
    purpose: str
    mend: str
    required: bool


@click.command("doctor")
@json_option
@click.pass_obj
def doctor_command(output: Output) -> int:
    """Say what is installed, which device there is, and what is missing.

    The exit status is 1 if something is missing that compiling or running kernels needs; extras that only add to them
    are named, and do not count. No device is started and no package is loaded.
    """
    facts = examine()
    if output.as_json:
        output.json(facts)
    else:
        show(output, facts)
    return 0 if facts["ok"] else 1


def examine() -> dict[str, Any]:
    """Returns everything that ``doctor --json`` says."""
    from tpukern import device, emulated_ops

    wanted = requirements()
    kind = device.kind()
    cache = cache_facts()
    missing = [*missing_packages(wanted), *missing_extras(wanted, kind), *missing_cache(cache)]
    return {
        "ok": not any(item.required for item in missing),
        "tpukern": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {r.name: package(r, wanted) for r in wanted},
        "extras": {extra: all(r.met for r in wanted if r.extra == extra) for extra in PURPOSES},
        "device": {
            "kind": kind,
            "description": device.description(),
            "xla_flags": emulated_ops.xla_flags(None) if kind == "emulated" else None,
        },
        "cache": cache,
        "missing": [dataclasses.asdict(item) for item in missing],
    }


def package(requirement: Requirement, wanted: list[Requirement]) -> dict[str, Any]:
    """Returns what ``doctor --json`` says of one package."""
    extras = [r.extra for r in wanted if r.name == requirement.name and r.extra]
    return {"installed": requirement.installed, "wanted": requirement.rule, "ok": requirement.met, "extras": extras}


def missing_packages(wanted: list[Requirement]) -> list[Missing]:
    """Returns what tpukern itself requires and does not have."""
    found = []
    for r in wanted:
        if not r.extra and not r.met:
            index = f" --index-url {TORCH_INDEX}" if r.name == "torch" else ""
            found.append(
                Missing(what=state(r), purpose="all of tpukern", mend=f"pip install '{r.pip_name}'{index}", required=True)
            )
    return found


def missing_extras(wanted: list[Requirement], kind: str) -> list[Missing]:
    """Returns the extras that are not whole; on a TPU the emulator is not one, without a TPU the ``tpu`` extra is not."""
    found = []
    for extra, purpose in PURPOSES.items():
        unmet = [r for r in wanted if r.extra == extra and not r.met]
        if not unmet or extra == ("emulator" if kind == "tpu" else "tpu"):
            continue
        what, mend = "; ".join(map(state, unmet)), f"pip install 'tpukern[{extra}]'"
        if extra in ("tpu", "emulator") and not has_torch_tpu_wheels():
            what, mend = f"torch_tpu has no build for {platform.system()} {platform.machine()}, Python {python()}", ""
            found.append(Missing(what=what, purpose=f"{purpose} (kernels run on CPU tensors)", mend=mend, required=False))
        else:
            found.append(Missing(what=what, purpose=purpose, mend=mend, required=extra not in ("helion", "test")))
    return found


def missing_cache(cache: dict[str, Any]) -> list[Missing]:
    """Returns what is wrong with the cache folder, if anything."""
    if cache["problem"] is None:
        return []
    mend = f"mkdir -p '{cache['path']}' && chmod u+rwx '{cache['path']}', or: export TPUKERN_CACHE_DIR=FOLDER"
    return [Missing(what=cache["problem"], purpose="not compiling twice", mend=mend, required=True)]


def state(r: Requirement) -> str:
    return f"{r.name} is not installed" if r.installed is None else f"{r.name} is {r.installed}, expected {r.rule}"


def python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def has_torch_tpu_wheels() -> bool:
    """Whether torch_tpu 0.2.0 is built for this machine: x86-64 Linux, Python 3.11 to 3.14."""
    return (platform.system(), platform.machine()) == ("Linux", "x86_64") and (3, 11) <= sys.version_info[:2] <= (3, 14)


def show(output: Output, facts: dict[str, Any]) -> None:
    """Writes the facts for a reader."""
    output.text(f"tpukern {facts['tpukern']}, Python {facts['python']}, {facts['platform']}\n")
    rows = []
    for name, found in facts["packages"].items():
        rows.append(
            (name, found["installed"] or "-", found["wanted"], ", ".join(found["extras"]), "ok" if found["ok"] else "missing")
        )
    output.table(("package", "installed", "wanted", "extra", ""), rows)
    extras = ", ".join(f"{name} {'yes' if whole else 'no'}" for name, whole in facts["extras"].items())
    cache, found = facts["cache"], facts["device"]
    output.text(f"\nextras: {extras}\ndevice: {found['description']}")
    if found["xla_flags"]:
        output.text(f"on it XLA runs with {found['xla_flags']}, else scans (cumsum, ...) would abort the process")
    output.text(f"cache: {cache['path']} ({used(cache)})\n")
    for item in facts["missing"]:
        mark = "missing" if item["required"] else "optional"
        output.text(
            f"{mark}: {item['what']}; needed for {item['purpose']}." + (f" Run: {item['mend']}" if item["mend"] else "")
        )
    output.text("All is well." if facts["ok"] else "Something needed is missing.")
