"""The questions of a verdict that are about the chip: precision, memory, synchronisation, the compiler."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tpukern.errors import TpukernError
from tpukern.targets import Target
from tpukern.testing import jaxprs, programs, properties, reference
from tpukern.testing.findings import Finding
from tpukern.testing.programs import Plan
from tpukern.testing.strategies import Case, Point


def arithmetic(session: properties.Session, case: Case) -> Iterator[Finding]:
    """Every dot in a kernel says at which precision it is computed, one that Mosaic takes."""
    try:
        plan = programs.plan(session.kernel, case.point, gradient=session.gradient)
        closed = jax.make_jaxpr(plan.function())(*plan.specs)
    except Exception as error:
        if (found := properties.refused(session, case, "arithmetic", error)) is not None:
            yield found
        return
    yield from unstated(session, case, closed)


def unstated(session: properties.Session, case: Case, closed: Any) -> Iterator[Finding]:
    """Yields the dots of a program's kernels that leave their precision to JAX's default."""
    seen = set()
    for eqn in jaxprs.equations(closed.jaxpr):
        if eqn.primitive.name != "pallas_call":
            continue
        kernel = jaxprs.kernel_name(eqn)
        direction = "backward" if session.gradient and kernel != session.kernel.name else "forward"
        for inner in jaxprs.equations(eqn.params["jaxpr"]):
            if inner.primitive.name != "dot_general" or inner.params["precision"] is not None:
                continue
            shapes = " and ".join(v.aval.str_short() for v in inner.invars)
            integers = all(np.issubdtype(v.aval.dtype, np.integer) for v in inner.invars)
            if integers or (kernel, shapes) in seen:
                continue
            seen.add((kernel, shapes))
            what = f"a dot of {shapes} in {kernel} states no precision; use tpukern.dsl.dot, or say precision="
            yield Finding(property="arithmetic", direction=direction, what=what, case=case)


def may_hang(session: properties.Session, point: Point) -> bool:
    """Whether a kernel has a loop whose end is not known, or waits for something: it may never end."""
    plan = programs.plan(session.kernel, point, gradient=session.gradient)
    closed = jax.make_jaxpr(plan.function())(*plan.specs)
    waits = ("while", "semaphore_wait", "dma_wait")
    return any(
        inner.primitive.name in waits
        for eqn in jaxprs.equations(closed.jaxpr)
        if eqn.primitive.name == "pallas_call"
        for inner in jaxprs.equations(eqn.params["jaxpr"])
    )


def semantics(session: properties.Session, case: Case) -> list[Finding]:
    """Under the TPU interpreter: no fault of memory or synchronisation, and the right results."""
    from tpukern.testing.semantics import Simulated

    try:
        plan = programs.plan(session.kernel, case.point, gradient=session.gradient)
        operands = plan.operands(case)
        report = Simulated(plan.function(), *plan.specs).run(*operands, timeout=session.timeout)
    except Exception as error:
        found = properties.refused(session, case, "semantics", error)
        return [] if found is None else [found]
    findings = []
    for f in report.findings:
        direction = "forward" if session.kernel.name in f.kernel.split(", ") else session.directions[-1]
        findings.append(Finding(property="semantics", direction=direction, what=str(f), case=case))
    if report.outputs is None:
        return findings
    results = {name: np.asarray(a) for name, a in zip(plan.names, report.outputs, strict=True)}
    unwritten = _unwritten(session, plan, case, operands, results)
    if unwritten is not None:
        return [*findings, unwritten]
    if not findings and (wrong := properties.judged(session, plan, case, operands, results, "semantics")) is not None:
        findings.append(wrong)
    return findings


def written_everywhere(session: properties.Session, case: Case) -> Finding | None:
    """No element of a result is left as it was: plain interpret form begins with results full of NaN."""
    try:
        program = session.programs[case.point]
        operands = program.plan.operands(case)
        return _unwritten(session, program.plan, case, operands, program.run(operands))
    except Exception as error:
        return properties.refused(session, case, "written_everywhere", error)


def _unwritten(
    session: properties.Session, plan: Plan, case: Case, operands: Sequence[np.ndarray], results: reference.Arrays
) -> Finding | None:
    """Returns a result that still holds what uninitialised memory was filled with, which only a reference can tell from NaN."""
    if session.kernel.reference is None:
        return None
    exact = session.references.of(plan, operands).exact
    for o in session.results_of(plan):
        array = results[o.name].astype(np.float64)
        holes = np.isnan(array) & np.isfinite(exact.get(o.name, np.zeros(array.shape)))
        if holes.any():
            at = [int(i) for i in np.argwhere(holes)[0]]
            what = f"{int(holes.sum())} of {holes.size} elements of {o.name} are not written, from {at} on"
            direction = session.direction_of(plan, o.name)
            return Finding(property="written_everywhere", direction=direction, what=what, case=case, output=o.name)
    return None


def compiles(session: properties.Session, chosen: Sequence[Point], targets: Sequence[Target]) -> Iterator[Finding | None]:
    """The TPU compiler takes every point, direction and chip. Yields one answer each."""
    from tpukern.compiling import Job, compile_many

    jobs, where = [], []
    for point in chosen:
        signature = point.signature(session.kernel)
        for target in targets:
            for direction in session.directions:
                kernel = session.kernel.directions[direction]
                case = Case(point=dataclasses.replace(point, forward=type(point.forward)(), backward=type(point.backward)()))
                try:
                    call = signature if direction == "forward" else session.kernel.gradient_signature(signature)
                    bound = kernel.bind_signature(call, None, target)
                except TpukernError as error:
                    yield Finding(property="compiles", direction=direction, what=str(error), case=case)
                    continue
                jobs.append(Job(bound=bound, target=target, direction=direction, workload=str(point)))
                where.append((direction, case, target))
    for (direction, case, target), compiled in zip(where, compile_many(jobs) if jobs else (), strict=True):
        if compiled.ok:
            yield None
        else:
            error_text = str(compiled.error).strip().splitlines()[0] if compiled.error else "no reason given"
            yield Finding(property="compiles", direction=direction, what=f"{target.name}: {error_text}", case=case)
