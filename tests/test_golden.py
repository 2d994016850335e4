"""Every capture gives its golden page, byte for byte, and tables that fit. Every family has a sample on some page."""

from pathlib import Path

import pytest

from gpumap.agent.metrics import native, self_families
from gpumap.agent.published import published
from gpumap.lab.capture import replay
from gpumap.lab.capture.format import EXPECTED
from tests import golden
from tests.shown import maps, served_as_waste
from tests.test_widths import fits_the_terminal


@pytest.mark.parametrize("capture", golden.captures(), ids=lambda capture: capture.name)
def test_capture_gives_its_golden_page(capture: Path) -> None:
    assert golden.page(capture).decode() == (capture / EXPECTED).read_text()


@pytest.mark.parametrize("capture", golden.captures(), ids=lambda capture: capture.name)
def test_capture_gives_its_golden_page_in_every_dialect(capture: Path) -> None:
    assert golden.dialects_page(capture).decode() == (capture / golden.DIALECTS_PAGE).read_text()


@pytest.mark.parametrize("capture", golden.captures(), ids=lambda capture: capture.name)
def test_the_map_of_a_capture_has_its_findings(capture: Path) -> None:
    """/api/v1/map says what `gpumap waste` says of the same moment."""
    for snapshot in golden.snapshots(capture):
        served_as_waste(published(snapshot))


@pytest.mark.parametrize("capture", golden.captures(), ids=lambda capture: capture.name)
def test_the_tables_of_a_capture_fit_the_terminal(capture: Path) -> None:
    fits_the_terminal(maps(golden.snapshots(capture)[-1]))


def test_every_family_has_a_sample_in_some_capture() -> None:
    pages = "\n".join((capture / EXPECTED).read_text() for capture in golden.captures())
    families = (*native(replay.GROUPS, process_metrics=True), *self_families("0", "0"))
    missing = {family.name for family in families if f"# TYPE {family.name} " not in pages}
    assert missing - replay.CLOCK_DEPENDENT == set()
