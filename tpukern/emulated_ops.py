"""What XLA:CPU cannot run of torch_tpu's own lowerings, and what the emulated device does instead.

Never used on a TPU.
"""

import pathlib

# XLA:CPU turns an associative scan (cumsum, cumprod, logcumsumexp, embedding_bag, repeat_interleave, segment_reduce) into calls
# inside a fusion, on which its own fusion emitter aborts the process. Without this pass scans become while loops, which it runs.
_DISABLED_PASSES = ("associative-scan-rewriter",)
_DISABLE = "--xla_disable_hlo_passes="


def xla_flags(before: str | None) -> str:
    """Returns XLA_FLAGS for the emulated device: the user's, with the passes added that abort XLA:CPU.

    Args:
        before: The user's value: flags, or the name of a file that holds them.
    """
    text = before or ""
    if text and not text.lstrip().startswith("-"):
        try:
            text = pathlib.Path(text).read_text()
        except OSError:
            text = ""
    flags = text.split()
    disabled = [name for flag in flags if flag.startswith(_DISABLE) for name in flag.removeprefix(_DISABLE).split(",") if name]
    disabled += [name for name in _DISABLED_PASSES if name not in disabled]
    return " ".join([*(flag for flag in flags if not flag.startswith(_DISABLE)), _DISABLE + ",".join(disabled)])


def install() -> None:
    pass
