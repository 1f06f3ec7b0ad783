"""The demo: a PyTorch language model trained on the `tpu` device with tpukern's kernels, and those kernels compiled for TPUs.

1. `examples/tiny_llama.py` on the CPU: the reference curve.
2. The same script on the device, through `tpukern run`, with every override on; its curve must match the reference's.
3. `examples/tiny_llama_own_kernel.py`: the same model with a kernel of its own; its curve must match too.
4. Every kernel, its own included, through the TPU compiler.

Any part that fails, a curve that strays or a kernel that did not run ends the demo with exit status 1.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TPUKERN = Path(sys.executable).parent / "tpukern"

# Two float32 runs that differ only in the order of their sums drift apart: training amplifies rounding. With every initial
# weight moved by one unit in the last place, two runs of 200 steps on the CPU were 7e-6 apart in the first 20 steps and 4e-5
# in all. The tolerances leave room for other sizes of blocks and other CPUs; a term missing from a gradient, or another eps,
# is far outside.
EARLY_STEPS, EARLY = 20, 1e-4
LATE = 1e-3

# What has to run, forward and backward, and the kernels (or the ops) that count as it.
MUST_RUN = {
    "RMSNorm": ("rms_norm",),
    "attention": ("flash_attention",),
    "matmul": ("matmul", "matmul_nt", "matmul_tn", "linear"),
}
OWN = {"its own SwiGLU": ("tiny_llama::swiglu",)}


class DemoError(Exception):
    """A part of the demo that did not come out as it has to; printed as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """How far a curve is from the reference.

    Attributes:
        early: Largest difference of the first `EARLY_STEPS` losses.
        late: Largest difference of all losses.
        step: The step of the latter.
    """

    early: float
    late: float
    step: int


def match(losses: Sequence[float], reference: Sequence[float]) -> Match:
    """Compares two curves.

    Raises:
        DemoError: They are not of one length, a loss is not finite, or they differ beyond the tolerance.
    """
    if len(losses) != len(reference):
        raise DemoError(f"{len(losses)} losses against {len(reference)} of the reference")
    differences = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    bad = [step for step, difference in enumerate(differences) if not difference < float("inf")]
    if bad:
        raise DemoError(f"the loss of step {bad[0] + 1} is {losses[bad[0]]}, the reference's {reference[bad[0]]}")
    found = Match(early=max(differences[:EARLY_STEPS]), late=max(differences), step=differences.index(max(differences)) + 1)
    if found.early > EARLY:
        raise DemoError(f"a loss of the first {EARLY_STEPS} steps differs by {found.early:.1e}; expected at most {EARLY:g}")
    if found.late > LATE:
        raise DemoError(f"the loss of step {found.step} differs by {found.late:.1e}; expected at most {LATE:g}")
    return found


def learned(losses: Sequence[float]) -> tuple[float, float]:
    """Returns the mean loss of the first and of the last tenth of a run.

    Raises:
        DemoError: The model learned nothing to speak of, so that equal curves would prove little.
    """
    tenth = max(len(losses) // 10, 1)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    if not last < 0.8 * first:
        raise DemoError(f"the mean loss went from {first:.3f} to {last:.3f}; expected less than 0.8 of it")
    return first, last


def check_kernels(rows: Sequence[dict[str, Any]], wanted: Mapping[str, Sequence[str]]) -> None:
    """Refuses an explanation in which something of `wanted` did not run in both directions."""
    for what, kernels in wanted.items():
        for direction in ("forward", "backward"):
            names = {name for kernel in kernels for name in (kernel, f"{kernel}_backward")}
            ran = [row for row in rows if row["kernel"] and row["direction"] == direction and row["calls"]]
            if not any(names & {row["kernel"], row["op"]} for row in ran):
                reasons = sorted({f"{row['op']}: {row['reason']}" for row in rows if row["reason"]})
                because = "\n  ".join([" PyTorch's own ran for", *reasons]) if reasons else ""
                raise DemoError(f"no kernel of tpukern's ran for {what}, {direction}.{because}")


def run(*command: str | Path, **environment: str) -> None:
    """Runs one part, showing what it says.

    Raises:
        DemoError: It failed.
    """
    names = {str(TPUKERN): "tpukern", sys.executable: "python"}
    shown = " ".join(names.get(str(word), str(word).replace(f"{ROOT}{os.sep}", "")) for word in command)
    print(f"$ {shown}", flush=True)
    done = subprocess.run(
        [str(word) for word in command], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise DemoError(f"exit status {done.returncode} of: {shown}")


def heading(text: str) -> None:
    print(f"\n=== {text}\n", flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """The demo's parts, in order.

    Attributes:
        steps: Training steps of every run.
        compile: What to compile at the end: a kernel that ships, or `all`.
        targets: Chips to compile for, as `tpukern compile --target` takes them.
        folder: Where curves and explanations are kept.
    """

    steps: int
    compile: str
    targets: str
    folder: Path

    def reference(self) -> list[float]:
        heading("The reference: PyTorch's own kernels on the CPU")
        curve = self.folder / "cpu.json"
        script = EXAMPLES / "tiny_llama.py"
        run(
            sys.executable,
            script,
            "--device",
            "cpu",
            "--steps",
            str(self.steps),
            "--save",
            curve,
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        )
        return json.loads(curve.read_text())["losses"]

    def on_device(self, name: str, reference: list[float], wanted: Mapping[str, Sequence[str]]) -> None:
        curve, rows = self.folder / f"{name}.json", self.folder / f"{name}.explain.json"
        beside = ("--steps", str(self.steps), "--save", curve, "--beside", self.folder / "cpu.json")
        run(TPUKERN, "run", "--opt-in", "all", "--explain-json", rows, EXAMPLES / f"{name}.py", *beside)
        found = match(json.loads(curve.read_text())["losses"], reference)
        check_kernels(json.loads(rows.read_text()), wanted)
        print(
            f"\nThe curves match: at most {found.early:.1e} apart in the first {EARLY_STEPS} steps (tolerance {EARLY:g}), "
            f"{found.late:.1e} in all (tolerance {LATE:g}).\ntpukern's kernels ran, forward and backward: {', '.join(wanted)}.",
            flush=True,
        )

    def compiled(self) -> None:
        own = f"{EXAMPLES / 'tiny_llama_own_kernel.py'}:swiglu"
        quiet = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        run(TPUKERN, "compile", own, "--target", self.targets, "--shape", "m=512,f=512", "--dtype", "float32", **quiet)
        run(TPUKERN, "compile", self.compile, "--target", self.targets, **quiet)

    def __call__(self) -> None:
        started = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        reference = self.reference()
        first, last = learned(reference)
        heading("The same script on the tpu device, with tpukern's kernels in place of PyTorch's")
        self.on_device("tiny_llama", reference, MUST_RUN)
        heading("The same model with a kernel of its own (examples/tiny_llama_own_kernel.py)")
        self.on_device("tiny_llama_own_kernel", reference, MUST_RUN | OWN)
        heading(f"The kernels through the TPU compiler, for {self.targets}")
        self.compiled()
        seconds = time.monotonic() - started
        print(f"\nThe demo passed in {seconds:.0f} s: loss {first:.3f} to {last:.3f} on the CPU and on the device.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compile", default="all", help="the kernel to compile at the end, or all")
    parser.add_argument("--targets", default="v5e,v6e,v7x")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "demo", help="where curves and explanations are kept")
    options = parser.parse_args()
    try:
        Demo(steps=options.steps, compile=options.compile, targets=options.targets, folder=options.folder.absolute())()
    except DemoError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
