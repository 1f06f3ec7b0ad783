"""Runs Helion's own example tests through tpukern, unmodified, each in a process of its own; for `gen_helion_docs.py`.

python tools/helion_example.py CHECKOUT OUT CHIPS [TEST...]

The test's file and the examples are those of the checkout, as they are. What is exchanged is what runs a `helion.kernel`:
instead of Helion's launcher, a tpukern kernel at the shapes of the call, in interpret form on the CPU, so that the test's own
comparison judges the results. Then each kernel that was called is compiled for the chips at those shapes and the test's config.

Writes OUT/TEST.json for every test that has none. Needs `expecttest`, as Helion's tests do.
"""

import contextlib
import importlib
import inspect
import json
import os
import resource
import signal
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOST = 300  # characters of a message that are kept
TEST_S, COMPILE_S, KERNELS = 120, 60, 4  # seconds for a test, seconds for a compile, kernels of a test compiled
STEPS = 512  # of more steps than this, interpret form takes the largest blocks, as it does on the emulated device
FILE = "test_examples"
ENVIRONMENT = {
    "HELION_BACKEND": "pallas",
    "JAX_PLATFORMS": "cpu",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TPU_MIN_LOG_LEVEL": "3",
}
INTERPRET = "HELION_PALLAS_INTERPRET"  # only while test files are imported: it makes their tensors CPU tensors


class Calls:
    """The kernels that a test calls, each bound to the shapes of its first call."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}
        self.inside = False

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """While it is entered, Helion's objects do what they always do."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def prepare(self, value: Any, args: tuple[Any, ...]) -> tuple[Any, Any, list[Any]]:
        """Returns a `helion.kernel` as a tpukern kernel at the shapes of a call, its signature, and the call's tensors."""
        import jax
        import torch

        import tpukern
        from tpukern.dsl.helion_form import HelionForm
        from tpukern.dsl.signature import bind

        parameters = inspect.signature(value.fn).parameters
        given = {name: p.default for name, p in parameters.items()}
        given.update(zip(parameters, args, strict=False))
        tensors = {name: v for name, v in given.items() if isinstance(v, torch.Tensor)}
        arrays = [array(v) for v in tensors.values()]  # 64-bit integers as 32-bit ones, which is what a TPU has
        text = ", ".join(f"{name}: {dims(v)} {v.dtype}" for name, v in zip(tensors, arrays, strict=True))
        statics = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if name not in tensors}
        asking = HelionForm(value.fn.__name__, value, config=None, settings={})
        declared = asking.declared(f"{text} ->", ())  # what it returns is not said: a run on shapes alone tells
        form = asking.form(bind(declared, arrays, statics, {}), None)

        def run(*inputs: Any) -> tuple[Any, ...]:
            shaped = dict(zip(tensors, inputs, strict=True))
            results = form.run(form.default(), [{**statics, **shaped}[name] for name in parameters], True, None, None)
            return tuple(r for r in results if r is not None)

        results = jax.eval_shape(run, *arrays)
        outputs = ", ".join(f"out{n}: {dims(r)} {r.dtype}" for n, r in enumerate(results))
        kernel = tpukern.kernel(name=value.fn.__name__, frontend="helion", signature=f"{text} -> {outputs}")(value)
        return kernel, kernel.signature(*arrays, **statics), arrays

    def run(self, value: Any, args: tuple[Any, ...], config: Any) -> Any:
        """Runs a `helion.kernel` as tpukern runs it."""
        from tpukern.dsl import from_helion_config, using

        with self.ours():
            kernel, signature, arrays = self.prepare(value, args)
            form = kernel.helion.form(signature, None)
            ours = from_helion_config(kernel, taken(form, config)) if config is not None else None
            with using(interpret=True):
                bound = kernel.bind_signature(signature, ours)
                self.bound.setdefault(f"{place(value)}:{kernel.name}", (kernel, signature, bound.config))
                if steps(form, bound.config) > STEPS:
                    bound = kernel.bind_signature(signature, kernel.largest_config(signature))
                results = [tensor(r) for r in bound.function(*arrays)]
        return results[0] if len(results) == 1 else tuple(results)


class Bound:
    """Stands in for Helion's BoundKernel: knows what that knows, and runs as tpukern runs it."""

    def __init__(self, calls: Calls, kernel: Any, args: tuple[Any, ...]) -> None:
        self.calls, self.kernel, self.args = calls, kernel, args

    @property
    def form(self) -> Any:
        with self.calls.ours():
            kernel, signature, _ = self.calls.prepare(self.kernel, self.args)
            return kernel.helion.form(signature, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.form.bound, name)

    def to_triton_code(self, config: Any = None, **_: Any) -> str:
        form = self.form
        with self.calls.ours():
            return str(form.source(dict(config.config) if config is not None else form.default(), None))

    to_code = to_triton_code

    def compile_config(self, config: Any = None, **_: Any) -> Any:
        return lambda *args: self.calls.run(self.kernel, args, config)

    def __call__(self, *args: Any) -> Any:
        return self.calls.run(self.kernel, args, None)


def taken(form: Any, config: Any) -> dict[str, Any]:
    """Returns a config without what Helion's Pallas backend does not have, and flattened loops, which tpukern refuses."""
    unsupported = form.bound.config_spec.unsupported_config_keys(config.config)
    left_out = (*unsupported, "flatten_loop", "flatten_loops")
    return {key: value for key, value in config.config.items() if key not in left_out}


def steps(form: Any, config: Any) -> int:
    """Returns about how many blocks a config makes of all its loops together."""
    found = 1
    for (_, _, most), (_, size) in zip(form.blocks, (kv for kv in config.items() if kv[0].startswith("block_")), strict=False):
        found *= max(1, most // int(size))
    return found


def place(value: Any) -> str:
    return Path(value.fn.__code__.co_filename).name


def dims(x: Any) -> str:
    return " ".join(map(str, x.shape))


def array(x: Any) -> Any:
    import warnings

    from tpukern.helion_host import array_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return array_of(x)


def tensor(x: Any) -> Any:
    import numpy as np
    import torch

    wide = np.array(x, np.float32) if str(x.dtype) == "bfloat16" else np.array(x)
    return torch.from_numpy(wide).to(getattr(torch, str(x.dtype)))


def bring_up(checkout: Path, calls: Calls) -> None:
    """Imports Helion's test machinery, with a checkout's examples and a TPU's types; puts `calls` in its launcher's place."""
    os.environ.update(ENVIRONMENT, **{INTERPRET: "1"})
    import torch
    from helion import _testing
    from helion.runtime.kernel import Kernel

    _testing.PROJECT_ROOT, _testing.EXAMPLES_DIR = checkout, checkout / "examples"
    _testing.HALF_DTYPE = torch.bfloat16
    bind, call = Kernel.bind, Kernel.__call__

    def bound(self: Any, args: Any) -> Any:
        return bind(self, args) if calls.inside else Bound(calls, self, tuple(args))

    def called(self: Any, *args: Any, **keywords: Any) -> Any:
        if calls.inside:
            return call(self, *args, **keywords)
        given = self.normalize_args(*args, **keywords) if keywords else args
        return calls.run(self, given, self.configs[0] if len(self.configs) == 1 else None)

    Kernel.bind, Kernel.__call__ = bound, called  # type: ignore[method-assign]
    sys.path[:0] = [str(checkout), str(checkout / "test")]


def owner_of(module: Any, name: str) -> Any:
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, unittest.TestCase)]
    return next(c for c in classes if hasattr(c, name))


def outcome(module: Any, name: str) -> dict[str, Any]:
    """Runs a test, its marks of expected failures left out, and returns how it ended."""
    case = owner_of(module, name)(name)
    result = {"test": name}
    getattr(module, "setUpModule", lambda: None)()
    try:
        case.setUp()
        getattr(case, name)()
    except BaseException as error:
        if isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped":
            return {**result, "state": "skipped", "message": str(error)[:MOST]}
        traceback.print_exc()
        return {**result, "state": kind(error), "message": message(error)}
    return {**result, "state": "passed", "message": ""}


def kind(error: BaseException) -> str:
    """Returns `refused` for what Helion says no to, `wrong` for results that differ, else `failed`."""
    from tpukern.errors import TpukernError

    cause = error.__cause__
    if isinstance(error, TpukernError) and cause is not None and type(cause).__module__.startswith("helion"):
        return "refused"
    return "wrong" if isinstance(error, AssertionError) and str(error) else "failed"


def message(error: BaseException) -> str:
    from tpukern.errors import TpukernError

    text = " ".join(str(error).split())
    return (text if isinstance(error, TpukernError) else f"{type(error).__name__}: {text}")[:MOST]


def compile_all(calls: Calls, chips: list[str], write: Callable[[dict[str, str]], None]) -> None:
    """Compiles the kernels that were called, for every chip."""
    from tpukern import compiling
    from tpukern.targets import target

    jobs, names = [], []
    with calls.ours():
        for name, (kernel, signature, config) in list(calls.bound.items())[:KERNELS]:
            for chip in chips:
                try:
                    jobs.append(compiling.Job(bound=kernel.bind_signature(signature, config, chip), target=target(chip)))
                    names.append(name)
                except Exception as raised:
                    write({"kernel": name, "chip": chip, "error": message(raised)})
        results = compiling.compile_many(jobs, workers=1, timeout_s=COMPILE_S) if jobs else []
    for name, result in zip(names, results, strict=True):
        write({"kernel": name, "chip": result.target, "error": " ".join((result.error or "").split())[:MOST]})


def run_one(module: Any, name: str, out: Path, chips: list[str]) -> None:
    """Runs and compiles one test's kernels, in a process that nothing else uses."""
    calls = CALLS
    record = {**outcome(module, name), "kernels": list(calls.bound), "compiled": []}

    def write(compiled: dict[str, str] | None = None) -> None:
        record["compiled"] += [compiled] if compiled else []
        out.write_text(json.dumps(record))  # a compile that hangs leaves what is there

    write()
    signal.alarm(len(chips) * KERNELS * COMPILE_S)
    compile_all(calls, chips, write)


CALLS = Calls()


def main() -> None:
    checkout, folder, chips, *tests = sys.argv[1:]
    bring_up(Path(checkout).resolve(), CALLS)
    module = importlib.import_module(FILE)  # once: it takes as long as a test
    os.environ.pop(INTERPRET)
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == FILE]
    every = [name for c in classes for name in dir(c) if name.startswith("test_")]
    for name in tests or dict.fromkeys(every):
        out = Path(folder) / f"{name}.json"
        if out.is_file():
            continue
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CPU, (TEST_S, TEST_S))
            signal.alarm(10 * TEST_S)
            try:
                run_one(module, name, out, [c for c in chips.split(",") if c])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if not out.is_file():
            late = status in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
            how = f"took more than {TEST_S} s" if late else f"ended its process with status {status}"
            out.write_text(json.dumps({"test": name, "state": "failed", "message": how, "kernels": [], "compiled": []}))
        print(name, json.loads(out.read_text())["state"], flush=True)


if __name__ == "__main__":
    main()
