"""`gpumap doctor --driver-facts`: what only a real driver can settle, over the compiled stand-in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpumap.agent.nvml_worker.facts import FACTS
from gpumap.agent.sources.driver_facts import QUESTIONS, read_fact
from tests import standin
from tests.command import run_command
from tests.standin import Code, Driver, Gpm, Gpu, MigInstance, Process, Sample

A, B = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "ab")
MIG_B = "MIG-00000000-0000-0000-0000-00000000001b"
PID = 31_415
ALL_LINKS = 0xFFFFFFFF
PAGE = Path(__file__).parents[1] / "docs/dev/driver-facts.md"


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


def ask(library: Path, directory: Path, driver: Driver) -> tuple[int, str, dict[str, dict[str, Any]]]:
    driver.write(directory / "state")
    done = run_command(
        "doctor", "--driver-facts", "--nvml-library", str(library), **standin.environment(library, directory / "state")
    )
    assert done.stderr == ""
    return done.returncode, done.stdout, {one["fact"]: one for one in json.loads(done.stdout)["facts"]}


def test_each_question_is_answered(library: Path, tmp_path: Path) -> None:
    """With the driver's own words. A user sends them in a bug report: no PIDs, no UUIDs."""
    code, text, facts = ask(library, tmp_path, node())
    assert code == 0
    assert {name: fact["question"] for name, fact in facts.items()} == QUESTIONS
    answers = {name: fact["answer"] for name, fact in facts.items()}
    assert answers["versions"]["driver"] == "550.54.15"
    samples = answers["process_samples"]["first"][0]["answer"]
    assert samples["sizing"] == {"code": "insufficient_size", "count": 5}
    everything = samples["all"]
    assert (everything["count"], everything["empty_rows"], everything["rows_above_100_percent"]) == (5, 3, 1)
    assert [row["listed"] for row in everything["rows"][:2]] == [True, False]
    fields = answers["field_values"]["later"][0]["fields"]
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


def test_a_crash_costs_one_fact(library: Path, tmp_path: Path) -> None:
    """The others are answered, and the fact says how the process ended."""
    driver = node()
    driver.crash.add(("nvmlEventSetWait_v2", "*"))
    code, _, facts = ask(library, tmp_path, driver)
    assert code == 0
    assert {name for name, fact in facts.items() if "answer" not in fact} == {"event_wait"}
    assert "was killed by SIGABRT" in facts["event_wait"]["error"]


async def test_a_hang_costs_one_fact(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed after its time."""
    driver = node()
    driver.delay["nvmlSystemGetDriverVersion", "*"] = float("inf")
    driver.write(tmp_path / "state")
    monkeypatch.setenv("GPUMAP_STANDIN_STATE", str(tmp_path / "state"))
    assert await read_fact("versions", str(library), 1.0) == {"error": "no answer within 1 s"}


def test_without_a_driver_each_fact_says_so(tmp_path: Path) -> None:
    """The command fails then."""
    done = run_command("doctor", "--driver-facts", "--nvml-library", str(tmp_path / "none.so"))
    assert done.returncode == 1
    refused = [fact["answer"]["refused"] for fact in json.loads(done.stdout)["facts"]]
    assert refused == ["library_not_found"] * len(QUESTIONS)


def test_an_agent_is_not_asked() -> None:
    """An agent has no endpoint for it."""
    done = run_command("doctor", "--driver-facts", "--url", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--driver-facts" in done.stderr


def test_each_fact_has_a_question_and_a_row_in_the_docs() -> None:
    """The page for developers says what gpumap assumes until a driver settles it."""
    assert list(QUESTIONS) == list(FACTS)
    assert {name for name in QUESTIONS if f"`{name}`" in PAGE.read_text()} == set(QUESTIONS)
