"""The tuned configs that ship: each is of a kernel and workload that ship too, legal there and no worse than the default."""

import pytest

import tpukern
from tpukern import kernels
from tpukern.autotune import recording
from tpukern.autotune.recording import Record, Store

RECORDS = Store(recording.SHIPPED).all()
NAMED = {  # kernels by name, with the workload signatures that they have
    kernel.name: (kernel, [(w.name, kernel.workload_signature(w)) for w in forward.workloads if direction in w.directions])
    for forward in (getattr(kernels, name) for name in kernels.__all__)
    for direction, kernel in forward.directions.items()
}


@pytest.fixture(autouse=True)
def shipped_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUKERN_RECORDS", "shipped")
    for kernel, _ in NAMED.values():
        kernel.forget_defaults()


def test_there_are_some() -> None:
    assert {record.target for record in RECORDS} == {"v5e", "v6e", "v7x"}
    assert len({record.kernel for record in RECORDS}) >= 4


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r.target} {r.kernel} {r.workload}")
def test_a_shipped_record(record: Record) -> None:
    assert record.source == "replay"
    assert record.verified
    assert record.tried == record.space or record.tried > 3
    assert record.default_us is None or record.us <= record.default_us
    assert record.versions["libtpu"] == "0.0.51"
    kernel, signatures = NAMED[record.kernel]
    signature = dict(signatures)[record.workload]
    assert dict(signature.sizes) == dict(record.sizes)
    assert dict(kernel.default_config(signature, record.target)) == dict(record.config)
    assert kernel.config_origin(signature, record.target) == "shipped record"
    assert tpukern.target(record.target).name == record.target
