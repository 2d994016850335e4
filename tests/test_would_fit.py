"""Which MIG profile, or part of a GPU, a use would fit: never less than it needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumap.model.would_fit import MARGIN, smallest_fit

GIB = 1 << 30
TOTALS = {
    "NVIDIA A100-SXM4-40GB": 40 * GIB,
    "NVIDIA A100-SXM4-80GB": 80 * GIB,
    "NVIDIA H100 80GB HBM3": 85_520_809_984,
    "NVIDIA H100 NVL": 94 * GIB,
    "NVIDIA H200": 150_754_820_096,
    "NVIDIA B200": 179 * GIB,
    "NVIDIA A30": 24 * GIB,
    "NVIDIA L40S": 45 * GIB,
}


@pytest.mark.parametrize(
    ("model", "peak_gib", "sm_ratio", "what"),
    [
        ("NVIDIA H100 80GB HBM3", 5, 0.1, "1g.10gb"),
        ("NVIDIA H100 80GB HBM3", 12, 0.1, "1g.20gb"),
        ("NVIDIA H100 80GB HBM3", 5, 0.2, "2g.20gb"),
        ("NVIDIA H100 80GB HBM3", 28, 0.1, "3g.40gb"),
        ("NVIDIA H100 80GB HBM3", 28, 0.45, "4g.40gb"),
        ("NVIDIA H100 80GB HBM3", 40, 0.1, None),
        ("NVIDIA H100 80GB HBM3", 1, 0.9, None),
        ("NVIDIA A100-SXM4-40GB", 3, 0.1, "1g.5gb"),
        ("NVIDIA A100-SXM4-80GB", 3, 0.1, "1g.10gb"),
        ("NVIDIA H100 NVL", 3, 0.1, "1g.12gb"),
        ("NVIDIA H200", 13, 0.1, "1g.18gb"),
        ("NVIDIA H200", 14, 0.1, "1g.35gb"),
        ("NVIDIA B200", 3, 0.1, "1g.23gb"),
        ("NVIDIA A30", 3, 0.1, "1g.6gb"),
        ("NVIDIA A30", 3, 0.3, "2g.12gb"),
        ("NVIDIA L40S", 3, 0.1, "1/8 GPU"),
        ("NVIDIA L40S", 8, 0.2, "1/4 GPU"),
        ("NVIDIA L40S", 30, 0.2, None),
    ],
)
def test_the_smallest_that_fits(model: str, peak_gib: int, sm_ratio: float, what: str | None) -> None:
    """Memory and SM time both have room; a model without known profiles is divided."""
    found = smallest_fit(model, TOTALS[model], peak_gib * GIB, sm_ratio)
    assert (found.what if found else None) == what


def test_a_model_of_another_size_has_no_profiles() -> None:
    """An H100 of 64 GiB is not one of the table."""
    found = smallest_fit("NVIDIA H100 64GB", 64 * GIB, GIB, 0.01)
    assert found
    assert found.what == "1/8 GPU"


@pytest.mark.parametrize("model", ["GRID A100-40C", "NVIDIA A100-40C"])
def test_a_vgpu_has_no_profiles(model: str) -> None:
    """Its virtual machine cannot partition it."""
    found = smallest_fit(model, 40 * GIB, GIB, 0.01)
    assert found
    assert found.what == "1/8 GPU"


@pytest.mark.parametrize(
    ("peak_gib", "what", "saved"), [(1, "1g.10gb", 6 / 7), (12, "1g.20gb", 6 / 8), (30, "3g.40gb", 1 / 2)]
)
def test_what_it_saves(peak_gib: int, what: str, saved: float) -> None:
    """The rest of the GPU, by what runs out first: its SMs or its memory."""
    found = smallest_fit("NVIDIA A100-SXM4-80GB", 80 * GIB, peak_gib * GIB, 0.1)
    assert found
    assert found.what == what
    assert found.saved_gpus == pytest.approx(saved)


@given(st.sampled_from(sorted(TOTALS)), st.floats(0, 1), st.floats(0, 1))
def test_it_is_never_too_small(model: str, memory_ratio: float, sm_ratio: float) -> None:
    """What stays has room for the memory and the SM time, with the margin."""
    found = smallest_fit(model, TOTALS[model], memory_ratio * TOTALS[model], sm_ratio)
    if found is None:
        assert max(memory_ratio, sm_ratio) * MARGIN > 0.4
    else:
        assert 0 < found.saved_gpus < 1
        assert sm_ratio * MARGIN <= 1 - found.saved_gpus + 1e-9
