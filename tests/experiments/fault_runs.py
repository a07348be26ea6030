"""A run in which something goes wrong, on a CPU or a card: what is said, what is kept, and that the next run works."""

from __future__ import annotations

import pytest

from labkit.specs.workload import RequestSpec, Workload

LENGTHS = (2, 3, 60, 60)


def mixed_workload(name: str = "plain") -> Workload:
    """Two short requests that end early and two long ones."""
    return Workload(name, tuple(RequestSpec(0.0, 5 + index, length) for index, length in enumerate(LENGTHS)))


def check_a_faulty_run(session, fault: str, error: type[Exception], words: str, works: str, restarts: bool) -> None:
    """`fault` of `FaultyBackend` in step 12 raises `error` with `words` and advice `works`; short requests are kept,
    and the next run is whole, in a new worker where the fault `restarts` it."""
    with pytest.raises(error, match=words) as caught:
        session.run(workload=mixed_workload(f"fault:{fault}@12"))
    assert works in caught.value.works
    failed = session.records()[-1]
    assert failed.status == "failed"
    assert words.replace("\\", "") in failed.error
    assert [row.output_tokens for row in failed.requests if row.finish_reason == "length"] == [2, 3]
    assert session.store.get(failed.run_id).error == failed.error
    generation, said = session._runner.worker.generation, []
    record = session.run(workload=mixed_workload(), on_event=said.append)
    assert record.status == "finished"
    assert [row.output_tokens for row in record.requests] == list(LENGTHS)
    assert (session._runner.worker.generation > generation) is restarts
    assert any("restarted" in event.get("message", "") for event in said) is restarts
