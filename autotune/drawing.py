"""The figures of a report, drawn by Matplotlib (extra `report`) as SVG text. Nothing here computes a time: all are given."""

import dataclasses
import functools
import io
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tpukern.autotune.chips import Chip
from tpukern.autotune.timeline import LANES, Event
from tpukern.errors import ConfigError

INK: Final = "#1f2933"
COLOURS: Final = ("#2f6f9f", "#d9822b", "#4f9d69", "#a8517e", "#7a6fb0", "#8a6d3b", "#5f7d8c", "#b4553f")
_LANE_COLOURS: Final = {"compute": COLOURS[0], "wait": "#c8cdd3", "HBM read": COLOURS[2], "HBM write": COLOURS[1]}
_WIDE: Final = 6.4  # inches
_MOST_BARS: Final = 600  # of one lane in a figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A kernel on a roofline.

    Attributes:
        label: Which it is.
        intensity: Operations for each byte moved between HBM and the core.
        flops_per_s: Operations in dots a second, predicted.
    """

    label: str
    intensity: float
    flops_per_s: float


@functools.cache
def matplotlib() -> types.ModuleType:
    """Imports Matplotlib, without a display.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import matplotlib as found
    except ImportError as error:
        raise ConfigError(
            "report", "Matplotlib is not installed", "the plots' library", "pip install 'tpukern[report]'"
        ) from error
    found.use("svg")
    return found


def _figure(draw: Callable[[Any], None], rows: int, height: float, name: str) -> str:
    """Returns a figure with its axes one below the other, as an SVG element; `name` keeps its ids apart from others'."""
    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib().rc_context(style):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDE, height), layout="constrained")
        draw(figure.subplots(rows, 1, squeeze=False)[:, 0])
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    found = text.getvalue()
    return found[found.index("<svg") :].strip()


def roofline(chips: Mapping[str, Chip], marks: Mapping[str, Sequence[Mark]], name: str) -> str:
    """Draws each chip's roof (matrix units and memory at their published peaks) and the kernels under it.

    Args:
        chips: By target name, from top to bottom.
        marks: The kernels, by target name.
        name: Of the figure.
    """

    def draw(axes: Any) -> None:
        for ax, (target, chip) in zip(axes, chips.items(), strict=True):
            here = marks.get(target, ())
            ridge = chip.peak_flops / chip.hbm_bytes_per_s
            least = min([m.intensity for m in here] + [ridge / 64])
            most = max([m.intensity for m in here] + [ridge * 8])
            xs = [least, ridge, most] if least < ridge < most else [least, most]
            ax.plot(xs, [min(x * chip.hbm_bytes_per_s, chip.peak_flops) / 1e12 for x in xs], color=INK, linewidth=1)
            for number, mark in enumerate(here):
                ax.plot(mark.intensity, mark.flops_per_s / 1e12, "o", color=COLOURS[number % len(COLOURS)], label=mark.label)
            ax.set(xscale="log", yscale="log", title=target, ylabel="TFLOP/s")
            ax.grid(True, which="major", alpha=0.25)
            if here:
                ax.legend(fontsize=7, frameon=False, loc="lower right")
        axes[-1].set_xlabel("FLOP for each byte of HBM")

    return _figure(draw, len(chips), 2.4 * len(chips), name)


def shares(rows: Sequence[tuple[str, float, float]], name: str) -> str:
    """Draws, for each label, which shares of the peaks of matrix units and memory are used.

    Args:
        rows: Label, share of the matrix units' peak, share of the memory's published bandwidth; shares from 0 to 1.
        name: Of the figure.
    """

    def draw(axes: Any) -> None:
        (ax,) = axes
        places = range(len(rows))
        ax.barh([p - 0.19 for p in places], [100 * r[1] for r in rows], 0.36, color=COLOURS[0], label="matrix units")
        ax.barh([p + 0.19 for p in places], [100 * r[2] for r in rows], 0.36, color=COLOURS[2], label="HBM bandwidth")
        ax.set_yticks(list(places), [r[0] for r in rows], fontsize=7)
        ax.invert_yaxis()
        ax.set(xlim=(0, 105), xlabel="% of the published peak")
        ax.legend(fontsize=7, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return _figure(draw, 1, 0.9 + 0.3 * len(rows), name)


def vmem(rows: Sequence[tuple[str, Sequence[tuple[str, int]], int]], name: str) -> str:
    """Draws what takes VMEM.

    Args:
        rows: Target; what takes how many bytes; the limit in bytes.
        name: Of the figure.
    """

    def draw(axes: Any) -> None:
        (ax,) = axes
        labels = list(dict.fromkeys(label for _, parts, _ in rows for label, _ in parts))
        colour = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
        named = set()
        for place, (_, parts, limit) in enumerate(rows):
            left = 0.0
            for label, size in parts:
                extra = {} if label in named else {"label": label}
                ax.barh(place, size / 2**20, 0.55, left=left, color=colour[label], edgecolor="white", linewidth=0.5, **extra)
                named.add(label)
                left += size / 2**20
            ax.plot([limit / 2**20] * 2, [place - 0.4, place + 0.4], color="#b4232a", linewidth=2)
        ax.set_yticks(range(len(rows)), [r[0] for r in rows])
        ax.invert_yaxis()
        ax.set_xlabel("MiB of VMEM; the red mark is the limit")
        ax.legend(fontsize=7, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return _figure(draw, 1, 1.3 + 0.35 * len(rows), name)


def lanes(steps: Mapping[str, Sequence[Event]], name: str) -> str:
    """Draws what core and memory do in one grid step.

    Args:
        steps: The events, by target name.
        name: Of the figure.
    """

    def draw(axes: Any) -> None:
        for ax, (target, events) in zip(axes, steps.items(), strict=True):
            start = min(e.begin_us for e in events)
            for place, lane in enumerate(LANES):
                bars = [(e.begin_us - start, e.end_us - e.begin_us) for e in events if e.lane == lane][:_MOST_BARS]
                ax.broken_barh(bars, (place - 0.4, 0.8), color=_LANE_COLOURS[lane])
            ax.set_yticks(range(len(LANES)), LANES, fontsize=7)
            ax.invert_yaxis()
            ax.set_title(target)
        axes[-1].set_xlabel("us")

    return _figure(draw, len(steps), 0.4 + 1.3 * len(steps), name)


def landscape(times: Mapping[str, Sequence[float]], default: Mapping[str, float], name: str) -> str:
    """Draws the times of all configs that were tried, the fastest first.

    Args:
        times: Microseconds, by target name.
        default: Those of the default configs.
        name: Of the figure.
    """

    def draw(axes: Any) -> None:
        for ax, (target, values) in zip(axes, times.items(), strict=True):
            ordered = sorted(values)
            ax.plot(range(1, len(ordered) + 1), ordered, ".", color=COLOURS[0], markersize=4)
            if target in default:
                ax.axhline(default[target], color=COLOURS[1], linewidth=1, label="default config")
                ax.legend(fontsize=7, frameon=False, loc="upper left")
            ax.set(title=target, ylabel="us", yscale="log")
        axes[-1].set_xlabel("configs, the fastest first")

    return _figure(draw, len(times), 0.4 + 1.7 * len(times), name)
