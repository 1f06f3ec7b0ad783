"""The timeline of a replay: what it records adds up to the estimate, and a trace viewer can open it."""

import jax
import jax.numpy as jnp
import pytest

import tpukern
from tpukern.autotune import bundles, estimating
from tpukern.autotune import timeline as lines
from tpukern.errors import CompileError
from tpukern.kernels import rms_norm

pytest.importorskip("libtpu")
V5E = tpukern.target("v5e")


@pytest.fixture(scope="module")
def bound():
    x, w = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
    return rms_norm.bind(x, w, eps=1e-5, config={"block_r": 64}, target=V5E)


@pytest.fixture(scope="module")
def found(bound):
    return lines.timeline(bound, V5E)


@pytest.fixture(scope="module")
def predicted(bound):
    (estimate,) = estimating.estimate_many([estimating.Job(bound=bound, target=V5E)])
    return estimate


def test_it_adds_up_to_the_estimate(found, predicted):
    assert [o.name for o in found.operations] == [p.name for p in predicted.parts]
    assert found.operations[-1].end_us == pytest.approx(predicted.us)
    for op, part in zip(found.operations, predicted.parts, strict=True):
        spent = dict.fromkeys(lines.LANES, 0.0)
        for event in op.events:
            spent[event.lane] += event.end_us - event.begin_us
        assert spent["compute"] == pytest.approx(part.compute_us)
        assert spent["wait"] == pytest.approx(part.wait_us)
        assert spent["HBM read"] + spent["HBM write"] == pytest.approx(part.hbm_us)
        assert sum(event.bytes for event in op.events) == part.hbm_bytes


def test_a_step_is_a_stretch_of_the_kernel(found, bound):
    (call,) = bound.calls
    op, events = found.longest, found.step(call.steps)
    assert (call.steps, op.name.startswith("rms_norm")) == (8, True)
    length = (op.end_us - op.begin_us) / 8
    assert max(e.end_us for e in events) - min(e.begin_us for e in events) <= length * (1 + 1e-9)
    core = sum(e.end_us - e.begin_us for e in events if e.lane in ("compute", "wait"))
    assert core == pytest.approx(length)


def test_a_trace_is_in_the_trace_event_format(found):
    trace = found.as_trace()
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    assert names == ["operation", *lines.LANES]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == sum(1 + len(o.events) for o in found.operations)
    assert all(e["dur"] >= 0 and 0 <= e["ts"] <= found.operations[-1].end_us for e in spans)
    assert trace["otherData"]["source"] == "replay: predicted, not measured"


def test_a_schedule_that_cannot_be_read_is_an_error(monkeypatch, bound):
    monkeypatch.setattr(bundles, "TESTED_LIBTPU", ("0.0.1",))
    with pytest.raises(CompileError) as error:
        lines.timeline(bound, V5E)
    assert str(error.value).startswith("rms_norm[compile] on v5e: no timeline: libtpu ")
    assert str(error.value).endswith("can be read; expected a schedule that can be followed. See docs/estimate.md.")
