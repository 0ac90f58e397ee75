"""Every fault of the matrix is found in exactly its block; every clean case is clean."""

from __future__ import annotations

import pytest

from benchmarks import bench_compile
from tests.compiled import DYNAMO_WARNS

pytestmark = [pytest.mark.slow, DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]

CASES = {case.name: case for case in bench_compile.cases()}


def test_matrix_has_enough_of_both() -> None:
    planted = [case for case in CASES.values() if case.fault]
    assert len(planted) >= 22
    assert len(CASES) - len(planted) >= 13


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    score, about = bench_compile.detect("own", case)
    assert score == ("found" if case.fault else "clean"), about
