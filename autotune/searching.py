"""Which configs are tried, in which order.

A space of up to 64 configs is tried as a whole, the most promising first by a model of what can be told without a compiler
(grid steps and the blocks that they fetch); a larger one is left to Optuna, which starts from the default config and the first
of that order. Under a budget either stops early.
"""

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from tpukern.autotune import chips
from tpukern.dsl import Config, Kernel, Signature, dtypes, space
from tpukern.dsl.geometry import Geometry
from tpukern.dsl.roles import Input, Output
from tpukern.errors import ConfigError, TpukernError, TuneError
from tpukern.targets import Target

SMALL: Final = 64  # configs that are all tried
STRATEGIES: Final = ("auto", "exhaustive", "optuna")
_STEP_S: Final = 0.35e-6  # what a grid step costs beside its work: an order of magnitude, for sorting only
_FIRST: Final = 10  # of the sorted order, that Optuna starts from
_ASKS: Final = 40  # of Optuna, for one config that is legal and new


class Strategy(Protocol):
    """Decides what to try."""

    def ask(self, count: int) -> list[Config]:
        """Returns up to `count` configs not asked for before; none if there is nothing left to try."""

    def tell(self, config: Config, us: float | None) -> None:
        """Takes a result; None if the config failed."""


class Listed:
    """All of a list, in its order."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self._left = collections.deque(configs)

    def ask(self, count: int) -> list[Config]:
        return [self._left.popleft() for _ in range(min(count, len(self._left)))]

    def tell(self, config: Config, us: float | None) -> None:
        """A list learns nothing."""


class Guided:
    """Optuna's tree-structured Parzen estimator over the legal configs.

    Args:
        kernel: The kernel's name, for messages.
        configs: The legal ones, the most promising first.
        seed: The same seed asks for the same configs, given the same results.

    Raises:
        TuneError: Optuna is not installed.
    """

    def __init__(self, kernel: str, configs: Sequence[Config], seed: int = 0) -> None:
        try:
            import optuna
        except ImportError as error:
            found = f"a space of {len(configs)} configs is searched with Optuna, which is not installed"
            do = "pip install 'tpukern[tune]', or try them all: strategy='exhaustive'"
            raise TuneError(kernel, found, do=do) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna: Any = optuna
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_FIRST, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler)
        self._left = dict.fromkeys(configs)
        keys = list(dict.fromkeys(key for config in configs for key in config))
        values = {key: list(dict.fromkeys(c.get(key) for c in configs)) for key in keys}
        self._tried: dict[Config, Any] = {}
        self._kinds: dict[str, Any] = {k: optuna.distributions.CategoricalDistribution(v) for k, v in values.items()}
        self._first = collections.deque(configs[:_FIRST])

    def ask(self, count: int) -> list[Config]:
        found: list[Config] = []
        while len(found) < count and self._left:
            config = self._first.popleft() if self._first else self._drawn()
            if config in self._left:
                del self._left[config]
                self._tried.setdefault(config, None)
                found.append(config)
        return found

    def _drawn(self) -> Config:
        """Returns a legal config that was not tried: Optuna's, or the most promising one left if it finds none."""
        for _ in range(_ASKS):
            trial = self._study.ask(self._kinds)
            config = Config({key: value for key, value in trial.params.items() if value is not None})
            if config in self._left:
                self._tried[config] = trial
                return config
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return next(iter(self._left))

    def tell(self, config: Config, us: float | None) -> None:
        trial = self._tried.get(config)
        states = self._optuna.trial.TrialState
        if trial is not None:
            if us is None:
                self._study.tell(trial, state=states.FAIL)
            else:
                self._study.tell(trial, math.log(us))
        elif us is not None:
            params = {key: config.get(key) for key in self._kinds}
            self._study.add_trial(
                self._optuna.trial.create_trial(params=params, distributions=self._kinds, value=math.log(us))
            )


def strategy_of(name: str, kernel: str, configs: Sequence[Config]) -> Strategy:
    """Returns the strategy of that name; "auto" tries all of a small space.

    Raises:
        ConfigError: There is no such strategy.
        TuneError: It needs a package that is not installed.
    """
    if name not in STRATEGIES:
        raise ConfigError(kernel, f"no strategy {name!r}", f"one of {list(STRATEGIES)}")
    if name == "exhaustive" or (name == "auto" and len(configs) <= SMALL):
        return Listed(configs)
    return Guided(kernel, configs)


def legal_configs(kernel: Kernel, signature: Signature, target: Target) -> tuple[Config, ...]:
    """Returns the space, the most promising configs first.

    Raises:
        TuneError: It is empty; says which rule refuses how many.
    """
    found = kernel.configs(signature, target)
    if found:
        return tuple(sorted(found, key=promise(kernel, signature, target)))
    reasons = refusals(kernel, signature, target)
    total = sum(reasons.values())
    raise TuneError(
        kernel.name,
        f"none of its {total} configs is legal at {signature}: {counted(reasons)}",
        "one that is",
        "Declare other choices for its blocks, or tune another shape.",
        target=target.name,
    )


def counted(reasons: Mapping[str, int]) -> str:
    """Returns reasons with how often each came, the most frequent first."""
    return "; ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])))


def refusals(kernel: Kernel, signature: Signature, target: Target) -> dict[str, int]:
    """Returns how many of the declared configs each rule refuses."""
    k = kernel.declaration
    found: collections.Counter[str] = collections.Counter()
    options = {f"block_{name}": k.dims[name].choices for name in k.blocks}
    options |= {name: choice.choices for name, choice in k.choices.items()}
    for config in _product(options):
        try:
            space.resolve(kernel, (signature,), config, space.own_default(kernel), target)
        except TpukernError as error:
            found[_rule(error)] += 1
    return dict(found)


def _product(options: Mapping[str, Iterable[Any]]) -> Iterable[Config]:
    import itertools

    for values in itertools.product(*options.values()):
        yield Config(dict(zip(options, values, strict=True)))


def _rule(error: TpukernError) -> str:
    """Returns the rule that an error is about, the same for all configs that break it."""
    _, rejected, reason = error.found.partition(" is rejected: ")
    return reason if rejected else f"expected {error.expected}" if error.expected else error.found


def promise(kernel: Kernel, signature: Signature, target: Target) -> Callable[[Config], tuple[Any, ...]]:
    """Returns a sort key: what probably fits VMEM comes first, then what fetches least in the fewest steps."""
    if not kernel.is_tile:
        return lambda config: ()
    limit = min(kernel.vmem_limit_bytes or target.scoped_vmem_bytes, target.vmem_bytes)
    bandwidth = chips.chip(target).hbm_bytes_per_s

    def key(config: Config) -> tuple[Any, ...]:
        geometry = Geometry(kernel.declaration, signature, config)
        seconds = _fetched_bytes(geometry) / bandwidth + math.prod(geometry.grid) * _STEP_S
        return geometry.vmem_bytes > limit, seconds

    return key


def _fetched_bytes(geometry: Geometry) -> int:
    """Returns what moves between HBM and VMEM: a block moves again whenever a later dim of the grid comes round."""
    total = 0
    for o in geometry.declaration.operands:
        if not isinstance(o.role, Input | Output):
            continue
        block = math.prod(size for size in geometry.block_shape(o) if size is not None)
        own = {name for name in o.names if name in geometry.extents}
        fetches = 1
        walked = [(name, geometry.extents[name].count) for name in geometry.order]
        last = max((at for at, (name, count) in enumerate(walked) if name in own and count > 1), default=-1)
        for _, count in walked[: last + 1]:
            fetches *= count
        total += fetches * block * dtypes.item_bytes(geometry.dtype(o))
    return total
