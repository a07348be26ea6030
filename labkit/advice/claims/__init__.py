"""What tuning guides say about vLLM, each claim put to the test: `judge("C04")`, or all of them with `judge_all()`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from labkit.advice.claims import blocks, case_a, kv_bytes, limits, speed
from labkit.advice.claims.verdict import Verdict
from labkit.errors import UnknownNameError
from labkit.results import at_least, write_results
from labkit.text import plain

CASE_A = "CASE-A"
# "c4" and "4" mean C04.
_SHORT = re.compile(r"C?(\d{1,2})")
VERDICTS = "claims with a verdict and numbers"

CLAIMS: tuple[Callable[[], Verdict], ...] = (
    blocks.c01, blocks.c02, blocks.c03, blocks.c04, blocks.c05, blocks.c06, kv_bytes.c07, kv_bytes.c08, kv_bytes.c09,
    kv_bytes.c10, kv_bytes.c11, kv_bytes.c12, limits.c13, limits.c14, limits.c15, limits.c16, limits.c17, limits.c18,
    limits.c19, kv_bytes.c20, speed.c21, speed.c22, speed.c23, speed.c24, speed.c25, speed.c26, speed.c27, blocks.c28,
    speed.c29, speed.c30,
)  # fmt: skip
__all__ = ["CASE_A", "CLAIMS", "Verdict", "case_a", "claim_ids", "judge", "judge_all", "write_claims"]


def claim_ids() -> tuple[str, ...]:
    """C01 to C30."""
    return tuple(claim.__name__.upper() for claim in CLAIMS)


def judge(claim: str) -> Verdict:
    """Put one claim to the test, or the guides' reference case by the name "CASE-A".

    Raises:
        UnknownNameError: no such claim.
    """
    wanted = claim.strip().upper()
    short = _SHORT.fullmatch(wanted)
    if short:
        wanted = f"C{int(short.group(1)):02d}"
    if wanted == CASE_A:
        return case_a.judge_case()
    for test in CLAIMS:
        if test.__name__.upper() == wanted:
            return test()
    raise UnknownNameError(f"there is no claim {plain(claim, 40)!r}", works=f"C01 to C30, or {CASE_A}")


def write_claims(path: str | os.PathLike[str], claims: Iterable[str] | None = None) -> dict[str, Any]:
    """Judge and write a results file; returns its content."""
    verdicts = judge_all(claims)
    reference = [] if claims is not None else [case_a.judge_case().to_dict()]
    judged = sum(1 for verdict in verdicts if verdict.verdict != "not tested")
    return write_results(
        path, command="labkit claims --out results/claims.json", rows=[verdict.to_dict() for verdict in verdicts],
        summary={VERDICTS: at_least(judged, len(CLAIMS))}, reference_cases=reference,
    )  # fmt: skip


def judge_all(claims: Iterable[str] | None = None) -> tuple[Verdict, ...]:
    """The verdicts of `claims`, all by default, in order; errors as `judge`."""
    return tuple(judge(claim) for claim in (claim_ids() if claims is None else claims))
