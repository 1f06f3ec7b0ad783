"""Estimates against published device times.

    python benchmarks/estimate_accuracy.py [--measured FOLDER]

The records are bfloat16 matmuls on v5e, timed in JAX's documentation with `timeit` (source in the file): wall time of the
host. A constant dispatch time is taken off, the same for all. Records with an epilogue or a transposed operand are left out,
as are XLA's own; the report counts them. The kernel is rebuilt: a grid of (m, n, k) blocks with a float32 accumulator.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

DISPATCH_US = 110.0  # in each of the records, by the document's own smallest run
FILE = "jax_docs_matmul_v5e.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimates against published device times.")
    beside = Path(__file__).resolve().parents[2] / "shared" / "measured"
    parser.add_argument("--measured", type=Path, default=beside, help="folder of the published times")
    options = parser.parse_args()
    path = options.measured / FILE
    if not path.is_file():
        parser.error(f"no {FILE} in {options.measured}: name the folder of the published times with --measured")
    records = json.loads(path.read_text())["records"]
    taken = [r for r in records if r["kernel"] == "pallas" and r.get("variant") == "plain" and r["dtype"] == "bfloat16"]
    rows = [row(record) for record in taken]
    errors = [abs(r["error"]) for r in rows]
    report = {
        "records": len(rows),
        "left_out": len(records) - len(taken),
        "dispatch_us": DISPATCH_US,
        "rows": rows,
        "median_abs_error": round(statistics.median(errors), 4),
        "worst_abs_error": round(max(errors), 4),
    }
    print(json.dumps(report, indent=2))


def row(record: dict[str, Any]) -> dict[str, Any]:
    """Returns one comparison."""
    import jax
    import jax.numpy as jnp

    import tpukern
    from tpukern.kernels import matmul

    p, c = record["problem"], record["config"]
    x = jax.ShapeDtypeStruct((p["m"], p["k"]), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((p["k"], p["n"]), jnp.bfloat16)
    config = {"block_m": c["bm"], "block_n": c["bn"], "block_k": c["bk"]}
    found = tpukern.estimate(matmul, x, y, target=record["tpu"], config=config)
    measured = 1000 * record["time_ms"] - DISPATCH_US
    return {
        "problem": [p["m"], p["n"], p["k"]],
        "blocks": [c["bm"], c["bn"], c["bk"]],
        "measured_us": round(measured, 1),
        "estimated_us": round(found.us, 1),
        "source": found.source,
        "error": round(found.us / measured - 1, 4),
    }


if __name__ == "__main__":
    main()
