"""docs/troubleshooting.md has a place for all that `doctor` and gpumap's own metrics say."""

import re
from itertools import chain
from pathlib import Path

import pytest

from gpumap.model import remedies
from gpumap.model.document import OF_GPUS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
LOOK = ROOT / "src" / "gpumap" / "cli"
SOURCES = "".join((LOOK / name).read_text(encoding="utf-8") for name in ("doctor/verdicts.py", "doctor/gpu_checks.py"))
STATES = ("ok", "degraded", "missing", "failed", "warning", "not needed", "unknown")
REASONS = {
    *chain.from_iterable(remedies.SOURCES.values()),
    *chain.from_iterable(
        (remedies.FAULTS, remedies.RECOVERY, remedies.UNMATCHED, remedies.CAPABILITIES, remedies.HEALTH, remedies.PUSH)
    ),
}


def named_checks() -> set[str]:
    """The names that the code gives its checks, with a placeholder for what differs from GPU to GPU."""
    named = re.findall(r"""(?:Check|_down|_identity)\((?:document, )?\s*(f?"[^"]+")""", SOURCES)
    named += re.findall(r"""name(?:, [^=]+)? = ("[a-z_]+")""", SOURCES)
    plain = {one.removeprefix("f").strip('"').replace("{name}", "gpu/<index>") for one in named}
    return {re.sub(r"\{reason\}", "<reason>", re.sub(r"\{gpu\[.*?\]\}", "<index>", one)) for one in plain}


CHECKS = sorted(named_checks() | {*OF_GPUS})


def test_checks_are_found() -> None:
    """The names are taken out of the code: the best known of them are among what was found."""
    known = {"kubelet", "nvml", "device_checkpoint", "pod_logs", "push", "proc", "api_token"}
    assert known <= {*CHECKS}
    assert {"pid_visibility", "gpu/<index>", "gpu/<index>/xid", "unmatched_slots/<reason>", "gpm"} <= {*CHECKS}


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_has_a_row(check: str) -> None:
    """Whoever reads a line of `gpumap doctor` finds its name in the first column."""
    assert re.search(rf"^\| `{re.escape(check)}` \|", PAGE, re.MULTILINE), check


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_explained(state: str) -> None:
    """The words of the second column stand in one sentence."""
    (states,) = re.findall(r"^States: .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert f"`{state}`" in states
    assert f'"{state}"' in SOURCES


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_every_reason_is_there(reason: str) -> None:
    """Whoever reads a reason in a label, on the page or in the log finds it."""
    assert f"`{reason}`" in PAGE.partition("## By reason")[2]
