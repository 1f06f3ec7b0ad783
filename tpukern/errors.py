"""Every failure a user can cause, in one form.

``<subject>[<stage>] on <target>: <found>; expected <rule>. <do>``

One class a stage. The subject is the kernel (or the command) that failed. The cause, if another exception led here, is
kept as ``__cause__``.
"""

import difflib
from collections.abc import Iterable
from typing import ClassVar


class TpukernError(Exception):
    """Root of every error that tpukern raises on purpose.

    Args:
        subject: The kernel, op or command the error is about.
        found: What was found.
        expected: The rule that was broken, with its number and unit. Empty if the finding says it all.
        do: What the user can do about it. Empty if the rule says it.
        target: The chip, if the failure belongs to one.
    """

    stage: ClassVar[str] = "tpukern"

    def __init__(self, subject: str, found: str, expected: str = "", do: str = "", *, target: str | None = None) -> None:
        self.subject, self.found, self.expected, self.do, self.target = subject, found, expected, do, target
        where = f"{subject}[{self.stage}]" + (f" on {target}" if target else "")
        rule = f"; expected {expected}" if expected else ""
        text = f"{where}: {found}{rule}"
        super().__init__(text if text.endswith((".", "?")) else text + ".", do)

    def __str__(self) -> str:
        text, do = self.args
        return f"{text} {do}" if do else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.subject, self.found, self.expected, self.do, self.target)


def _rebuild(kind: type[TpukernError], subject: str, found: str, expected: str, do: str, target: str | None) -> TpukernError:
    return kind(subject, found, expected, do, target=target)


class SignatureError(TpukernError):
    """Operands, dims or dtypes that do not fit the kernel's declaration, or a declaration that breaks a rule."""

    stage = "signature"


class ConfigError(TpukernError):
    """A keyword, block size, choice, workload or target that the kernel or the command does not have."""

    stage = "config"


class LowerError(TpukernError):
    """A kernel that Pallas or Mosaic refuses before the compiler proper is asked."""

    stage = "lower"


class CompileError(TpukernError):
    """A kernel that the TPU compiler refuses, or a compile worker that died."""

    stage = "compile"


class OverrideError(TpukernError):
    """A registration, override or dispatched call that cannot be honoured."""

    stage = "override"


class ParityError(TpukernError):
    """A kernel that disagrees with its reference."""

    stage = "parity"


class RecordError(TpukernError):
    """Records of tuned configs that cannot be written, read or merged."""

    stage = "records"


class TuneError(TpukernError):
    """A search for a config that ends without one."""

    stage = "tune"


class DeviceError(TpukernError):
    """The ``tpu`` device cannot be had, or not in this order."""

    stage = "device"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``"Did you mean 'x'."`` for the known name closest to ``name``, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}." if close else ""
