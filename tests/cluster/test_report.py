"""The page about the live node: it has every case, and what each of them proves."""

from __future__ import annotations

from tests.cluster.cases import COMING_AND_GOING, DISTURBANCES
from tests.cluster.report import written_cases


def test_the_page_has_every_case() -> None:
    """The tables of docs/dev/cluster.md are of these cases; if not, run `make e2e-cluster`."""
    assert written_cases() == {case.name: case.proves for case in (*COMING_AND_GOING, *DISTURBANCES)}
