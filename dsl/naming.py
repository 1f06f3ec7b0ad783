"""A kernel by its name in its module: what pickling one comes down to, as for a function."""

import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any


def named(module: str, name: str) -> Any:
    """Returns what a module calls so, dots and all."""
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def reduced(kernel: Any) -> tuple[Callable[[str, str], Any], tuple[str, str]]:
    """Returns what pickle takes for a kernel.

    Raises:
        PicklingError: It has no name by which another process would find it.
    """
    place = kernel.fn.__module__, kernel.fn.__qualname__
    try:
        found = named(*place)
    except (ImportError, AttributeError):
        found = None
    if found is not kernel:
        rule = "a kernel declared at the top of a module, under the name of its function"
        raise pickle.PicklingError(f"{kernel.name}[pickle]: it is not {'.'.join(place)}; expected {rule}.")
    return named, place
