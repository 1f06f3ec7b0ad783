"""The process that loads libtpu: ``python -m tpukern.worker``, one JSON object a line over its pipes.

It says ``{"ready": versions}`` (or ``{"fatal": text}``) once, then answers each ``{"module", "topology", "options"}``, with
the compiler's schedules if its environment asks for them. It never
outlives its parent: a thread reads stdin, and when that ends the process ends too, in the middle of a compile if need be.
"""

import base64
import contextlib
import importlib
import importlib.metadata
import json
import os
import queue
import re
import shutil
import sys
import threading
import time
import zlib
from typing import Any

from tpukern import environment

_LONGEST_ERROR = 16_384  # characters; Mosaic can print whole kernels
_FIRST_TOPOLOGY = "v5e:2x2"
_SCHEDULE_FILE = re.compile(r"\d+-(.*)-\d+-packed-bundles-post-ra\.txt$")
_LARGEST_FILE_BYTES = 64 << 20  # of any log that libtpu writes despite TPU_MIN_LOG_LEVEL


def _bound_what_a_crash_leaves() -> None:
    """No core dumps (libtpu's are gigabytes), no large log files."""
    try:
        import resource
    except ImportError:  # not on POSIX
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if hard == resource.RLIM_INFINITY or hard > _LARGEST_FILE_BYTES:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE_BYTES, hard))


def _read_requests(requests: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    folder = environment.value("TMPDIR") or ""  # a living parent kills its workers and tidies up; this one has died
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: another worker will
        os.rmdir(os.path.dirname(folder))
    os._exit(0)


def _ready(devices: dict[str, Any]) -> dict[str, Any]:
    try:
        from tpukern import jax_adapter

        jax_adapter.load()
        importlib.import_module("libtpu")  # its own reason, if it cannot be imported
        devices[_FIRST_TOPOLOGY] = jax_adapter.topology_device(_FIRST_TOPOLOGY)  # loads the library, or says why not
        return {"ready": {"libtpu": importlib.metadata.version("libtpu"), **jax_adapter.versions()}}
    except Exception as error:
        return {"fatal": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}


def _schedules() -> dict[str, dict[str, str]]:
    """Takes the schedules that libtpu wrote, by operation, compressed; nothing if it was not asked to write them."""
    folder = environment.schedule_folder()
    if folder is None:
        return {}
    found = {}
    for path in sorted(folder.glob("*")):
        if name := _SCHEDULE_FILE.match(path.name):
            found[name[1]] = base64.b64encode(zlib.compress(path.read_bytes(), 1)).decode()
        path.unlink()
    return {"schedules": found}


def _answer(request: dict[str, Any], devices: dict[str, Any]) -> dict[str, Any]:
    from tpukern import jax_adapter

    stage = "topology"
    started = time.perf_counter()
    try:
        topology = request["topology"]
        if topology not in devices:
            devices[topology] = jax_adapter.topology_device(topology)
        stage = "compile"
        started = time.perf_counter()
        module = base64.b64decode(request["module"])
        code_bytes, executable = jax_adapter.compile_module(module, devices[topology], request["options"])
        seconds = time.perf_counter() - started
        vmem_bytes = jax_adapter.scoped_vmem_bytes(executable)
        sizes = {"code_bytes": code_bytes, "vmem_bytes": vmem_bytes}
        return {"ok": True, "seconds": seconds, **sizes, **_schedules()}
    except Exception as error:
        return {
            "ok": False,
            "seconds": time.perf_counter() - started,
            "stage": stage,
            "type": type(error).__name__,
            "error": str(error)[:_LONGEST_ERROR],
        }


def main() -> None:
    """Serves compile requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libtpu prints must not mix with the replies
    _bound_what_a_crash_leaves()
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    if (folder := environment.schedule_folder()) is not None:
        folder.mkdir(exist_ok=True)
    devices: dict[str, Any] = {}
    print(json.dumps(_ready(devices)), file=replies, flush=True)
    while True:
        print(json.dumps(_answer(requests.get(), devices)), file=replies, flush=True)


if __name__ == "__main__":
    main()
