"""scripts/driver_facts.py: what only a real driver can settle, over the compiled stand-in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.driver_facts import FACTS
from tests import standin
from tests.demo_process import environment
from tests.standin import Code, Driver, Gpm, Gpu, MigInstance, Process, Sample

A, B = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "ab")
MIG_B = "MIG-00000000-0000-0000-0000-00000000001b"
PID = 31_415
ALL_LINKS = 0xFFFFFFFF
ROOT = Path(__file__).parents[1]
SCRIPT, PAGE = ROOT / "scripts/driver_facts.py", ROOT / "docs/dev/driver-facts.md"


def node() -> Driver:
    """A GPU of garbage samples, and a partitioned one with GPM."""
    whole = Gpu(
        A,
        memory_temperature_celsius=0,
        processes=[Process(PID, 7)],
        samples=[Sample(PID, 40), Sample(PID + 1, 37_100, timestamp_us=5)],
        garbage_rows=3,
        fields={(138, ALL_LINKS): ("uint", 5), (139, ALL_LINKS): ("error", Code.NOT_SUPPORTED)},
        gpm=Gpm(sm=62.5),
    )
    return Driver(
        gpus=[whole, Gpu(B, instances=[MigInstance(MIG_B, gi=3, processes=[Process(PID, 9)], gpm=Gpm(sm=8.0))])]
    )


def ask(**variables: str) -> tuple[int, str, dict[str, dict[str, Any]]]:
    """Pipe the script into a Python, as into that of an agent's pod."""
    with SCRIPT.open() as script:
        done = subprocess.run(
            [sys.executable, "-"],
            stdin=script,
            env=environment(**variables),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stderr == ""
    return done.returncode, done.stdout, {one["fact"]: one for one in json.loads(done.stdout)["facts"]}


def test_each_question_is_answered(library: Path, tmp_path: Path) -> None:
    """With the driver's own words. A user sends them in a bug report: no PIDs, no UUIDs."""
    node().write(tmp_path / "state")
    code, text, facts = ask(**standin.environment(library, tmp_path / "state"))
    assert code == 0
    assert {name: fact["question"] for name, fact in facts.items()} == {name: one for name, (one, _) in FACTS.items()}
    answers = {name: fact["answer"] for name, fact in facts.items()}
    assert answers["versions"]["driver"] == "550.54.15"
    samples = answers["process_samples"]["first"][0]["answer"]
    assert samples["sizing"] == {"code": "insufficient_size", "count": 5}
    everything = samples["all"]
    assert (everything["count"], everything["empty_rows"], everything["rows_above_100_percent"]) == (5, 3, 1)
    assert [row["listed"] for row in everything["rows"][:2]] == [True, False]
    fields = answers["field_values"]["later"][0]["answer"]
    assert {key: fields["nvlink_transmit_kib"][key] for key in ("code", "type", "value")} == {
        "code": "success",
        "type": "uiVal",
        "value": 5,
    }
    assert fields["nvlink_receive_kib"] == {"code": "not_supported"}
    assert fields["memory_temperature"]["value"] == 0
    assert {wait["code"] for wait in answers["event_wait"]["gpus"][0]["answer"]["waits"]} == {"timeout"}
    partitioned = answers["process_lists"]["gpus"][1]["answer"]
    assert partitioned["gpu"]["compute"]["instances"] == ["3/0"]
    assert [device["compute"]["memory_sum"] for device in partitioned["mig_devices"]] == [9]
    measured = [gpu["measured"] for gpu in answers["gpm_scales"]["gpus"]]
    assert measured[0]["gpu"]["2"] == 62.5
    assert measured[1]["gpu_instance_3"]["2"] == 8.0
    assert not re.search(rf"GPU-|MIG-0|{PID}|{PID + 1}", text)


def test_a_crash_or_a_hang_costs_one_fact(library: Path, tmp_path: Path) -> None:
    driver = node()
    driver.crash.add(("nvmlEventSetWait_v2", "*"))
    driver.delay["nvmlSystemGetDriverVersion", "*"] = float("inf")
    driver.write(tmp_path / "state")
    variables = standin.environment(library, tmp_path / "state")
    code, _, facts = ask(DRIVER_FACTS_LIMIT_SECONDS="10", **variables)
    assert code == 0
    assert facts["event_wait"]["error"] == "the process ended with -6"
    assert facts["versions"]["error"] == "no answer within 10 s"


def test_without_a_driver_no_fact_is_known(tmp_path: Path) -> None:
    """The script fails then. The variable of the chart names the library."""
    code, _, facts = ask(GPUMAP_NVML_LIBRARY=str(tmp_path / "none.so"))
    assert (code, {fact["error"] for fact in facts.values()}) == (1, {"library_not_found"})


def test_it_needs_only_pynvml() -> None:
    """A user pipes only this file into any Python."""
    found = re.findall(r"^(?:import|from) ([a-z_]+)", SCRIPT.read_text(), re.MULTILINE)
    assert {*found} - sys.stdlib_module_names == {"pynvml"}


def test_each_fact_has_a_row_in_the_docs() -> None:
    """The page for developers says what gpumap assumes until a driver settles it."""
    assert {name for name in FACTS if f"`{name}`" in PAGE.read_text()} == {*FACTS}
