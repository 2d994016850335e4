"""Answers, files and flags that are made to harm a command: it bounds what it builds, and fails with one line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gpumap.agent.dialects import dcgm_entities
from gpumap.agent.published import published
from gpumap.agent.sources import json_files
from gpumap.cli import args, credentials, watch
from gpumap.cli.bill import pod_labels
from gpumap.cli.commands.map import map_table
from gpumap.cli.main import print_notices
from gpumap.cli.rows import NodeMaps
from gpumap.cli.screen import yaml_text
from gpumap.cli.table import Shape
from gpumap.lab.capture import anonymize, pseudonyms
from gpumap.model import cgroups, device_ids, workloads
from gpumap.model.errors import FatalError
from tests.command import one_line, run_command, run_command_in_loop
from tests.demo_process import GPUMAP, environment
from tests.played_prometheus import Answer, answering, serving
from tests.snapshots import busy_node

FOUND: dict[str, Any] = msgspec.to_builtins(published(busy_node()))


def answered(**fields: object) -> str:
    """A node's map with other fields, as an agent answers it."""
    return json.dumps({**FOUND, **fields})


def node_called(name: str) -> str:
    return answered(name=name)


# --- answers that fill the memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("-d",), ("-d", "--used"), ("-o", "json")])
async def test_a_gpu_with_a_huge_index(flags: tuple[str, ...]) -> None:
    gpus = [{**FOUND["gpus"][0], "index": 200_000, "uuid": "GPU-far"}]
    async with serving(answering(answered(gpus=gpus, devices=[]))) as url:
        message = one_line(await run_command_in_loop("inspect", *flags, "--url", url), 1)
    assert message == "a node has a GPU with the index 200000: no node has more than 1024 GPUs"


async def test_a_table_of_many_pods_and_gpus() -> None:
    """A row for each pod and a column for each GPU: 16 million cells are no table."""
    held = {**FOUND["devices"][0], "processes": [], "owners": []}
    holder = {**held["containers"][0], "use": None}
    held["containers"] = [{**holder, "pod": f"p-{number}"} for number in range(20_000)]
    gpus = [{**FOUND["gpus"][0], "index": index, "uuid": held["gpu_uuid"] if not index else f"GPU-{index}"}
            for index in range(1000)]  # fmt: skip
    async with serving(answering(answered(gpus=gpus, devices=[held]))) as url:
        message = one_line(await run_command_in_loop("inspect", "-d", "--url", url), 1)
    assert message.startswith("the table would have more than 256 MiB")


@pytest.mark.parametrize("command", ["map", "top", "waste", "inspect"])
async def test_a_name_of_a_megabyte(command: str) -> None:
    """Each row of a table is as wide as the widest: the answer is refused, and the line names the address."""
    async with serving(answering(node_called("n" * 1_000_000))) as url:
        message = one_line(await run_command_in_loop(command, "--url", url), 1)
    assert message == (
        f"{url}/api/v1/map did not answer with a map of this version of gpumap: a text is longer than 65536 characters"
    )


def test_a_closed_pipe_ends_a_table() -> None:
    one = published(busy_node())
    wide = msgspec.structs.replace(one, name="n" * (30 << 20))
    with pytest.raises(FatalError, match=r"^the table would have more than 256 MiB"):
        map_table(NodeMaps((one, wide), fleet=True), Shape())


async def test_the_field_that_does_not_fit() -> None:
    async with serving(answering(answered(devices=[{"uuid": 5}]))) as url:
        message = one_line(await run_command_in_loop("map", "--url", url), 1)
    assert message.startswith(f"{url}/api/v1/map did not answer with a map of this version of gpumap: ")
    assert message.endswith("`$.devices[0].uuid`")


# --- every text of an answer ------------------------------------------------------------------------------------------

STEERING = "\x1b]0;owned\x07\x1b[2J\u202e\r\n=1+1\tforged\x9b31m\u2028"
WORDS = {"owner", "finding", "source", "type", "reason", "resource", "uuid", "gpu_uuid", "profile", "health"}
"""Keys with texts that a command compares with words of its own. What is not one of them is left out of a table."""


def steering(value: Any, key: str = "") -> Any:
    """A part of a map with text that steers a terminal after each name."""
    if isinstance(value, dict):
        return {name: steering(one, name) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [steering(one, key) for one in value]
    return value + STEERING if isinstance(value, str) and key not in WORDS else value


@pytest.mark.parametrize(
    "command",
    [
        *("map", "map -o wide", "map -o json", "map -o yaml", "map -o name", "top", "top --processes", "top -o wide"),
        *("waste", "waste -o wide", "waste -o name", "inspect", "inspect -d", "inspect -d --used", "check"),
    ],
)
async def test_no_text_of_an_answer_steers_a_terminal(command: str) -> None:
    """Whatever names an agent answers, no line is forged, and no control character reaches the terminal."""
    small = steering(msgspec.to_builtins(published(busy_node(3, 2))))
    async with serving(answering(json.dumps(small))) as url:
        done = await run_command_in_loop(*command.split(), "--url", url)
    lines = (done.stdout + done.stderr).split("\n")
    assert [line for line in lines if not line.isprintable()] == []
    assert [line for line in lines if line.startswith(("=1+1", "forged"))] == []


@given(st.text() | st.text("\n\t :#-'\"\x85\u2028\ufeff\x00\x1b0~|>?!&*%@`,[]{}\ud800"), st.booleans())
def test_yaml_keeps_every_text(text: str, allow_unicode: bool) -> None:
    """libyaml and PyYAML's own dumper, which it needs for a lone surrogate, write what YAML reads as the same text."""
    values = {text: [text, {"a": text}]}
    assert yaml.safe_load(yaml_text(values, allow_unicode=allow_unicode)) == values


def test_yaml_of_hostile_text_does_not_need_the_slow_dumper() -> None:
    """PyYAML's own dumper looks at each character in Python: eight seconds of CPU for a map of 1.4 MB."""
    called = set()
    sys.setprofile(lambda frame, *_: called.add(Path(frame.f_code.co_filename).name))
    try:
        yaml_text(steering(msgspec.to_builtins(published(busy_node(3, 2)))))
    finally:
        sys.setprofile(None)
    assert "representer.py" in called
    assert "emitter.py" not in called


# --- sums of a Prometheus ---------------------------------------------------------------------------------------------

NOW = "1700000000"
TARGET = {"instance": "i:1", "job": "gpumap", "node": "n1"}


def vector(value: str, **labels: str) -> str:
    rows = [{"metric": labels, "value": [0, value]}]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": rows}})


def summing(value: str, collected: str = NOW, **labels: str) -> Answer:
    """A server with one healthy node. All its sums have this value."""

    async def answer(request: web.Request) -> web.Response:
        query = str((await request.post())["query"])
        if query == "vector(time())":
            return web.Response(text=vector(NOW))
        if query.startswith("gpumap_snapshot"):
            return web.Response(text=vector(collected, **TARGET))
        if query.endswith("== 0") or "unless" in query or "timestamp(" in query:
            return web.Response(text='{"status": "success", "data": {"resultType": "vector", "result": []}}')
        return web.Response(text=vector(value, **TARGET, namespace="ml", **labels))

    return answer


async def sums(command: str, answer: Answer) -> tuple[dict[str, Any], list[str]]:
    """Return the sums of the cluster, and what is missing."""
    async with serving(answer) as url:
        done = await run_command_in_loop(command, "--prometheus", url, "-o", "json")
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert done.returncode == bool(found["missing"]), done.stderr
    return found["sums"], found["missing"]


@pytest.mark.parametrize("labels", [{}, {"finding": "x"}, {"finding": "idle", "reason": "{age.x}", "uuid": "GPU-{}"}])
async def test_findings_that_are_none(labels: dict[str, str]) -> None:
    """A server that answers what was not asked for, or with any text, is no internal error."""
    async with serving(summing("1", **labels)) as url:
        done = await run_command_in_loop("waste", "--prometheus", url, "-o", "json")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert [one["finding"] for one in found["findings"]] == ["idle"] * ("reason" in labels)


@pytest.mark.parametrize("value", ["-5", "9" * 300, "1_0", "NaN", "+Inf", "2.5", "x"])
async def test_sums_that_are_none(value: str) -> None:
    """What no cluster has is left out and named: three rows, and how many more."""
    found, missing = await sums("map", summing(value))
    assert found["gpus"] is None
    assert found["free_devices"] == (2.5 if value == "2.5" else None)  # of a shared device a part can be free
    assert found["granted_bytes"] == (2 if value == "2.5" else None)  # compute instances share bytes
    rows = [one for one in missing if one.startswith("left out, because it is not valid: ")]
    names = ["gpus"] if value == "2.5" else ["gpus", "held_gpus", "free_devices"]
    assert [one.partition("{")[0].rpartition(" ")[2] for one in rows] == names
    assert all(len(one) < 150 for one in rows)


@pytest.mark.parametrize(
    ("row", "rows", "expected"),
    [
        ('{"metric":{},"value":[0,"1"]}', 2_000_000, "5 million values"),
        (f'{{"metric":{{"pod":"{"p" * (1 << 20)}"}},"value":[0,"1"]}}', 130, "128 MiB"),
    ],
)
async def test_a_vector_that_fills_the_memory(row: str, rows: int, expected: str) -> None:
    text = f'{{"status":"success","data":{{"resultType":"vector","result":[{",".join([row] * rows)}]}}}}'
    async with serving(answering(text)) as url:
        message = one_line(await run_command_in_loop("map", "--prometheus", url), 1)
    assert message == f"{url} answered with more than {expected}. Select less, for example by --match"


# --- answers that are no HTTP, and URLs -------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["?token=secret", "#part"])
def test_a_query_in_the_url(more: str) -> None:
    """The request would not have it. The line does not repeat it: it may be a secret."""
    message = one_line(run_command("map", "--url", f"http://user:word@a:1/b{more}"), 2)
    assert message == "--url http://a:1/b: must end with the path, without a query (?…) and a fragment (#…)"


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--token-file", "--ca-file", "--cert-file", "--key-file"])
def test_a_fifo_that_nothing_is_written_to(tmp_path: Path, flag: str) -> None:
    """It is refused: to open it would wait for ever."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    message = one_line(run_command("map", "--url", "https://127.0.0.1:9", flag, str(fifo)), 2)
    assert message.startswith(f"{flag} {fifo}: ")


async def test_a_token_from_a_command(tmp_path: Path) -> None:
    """The shell's <(command) is a FIFO too, and works."""
    async with serving(answering(answered())) as url:
        script = f"{GPUMAP} map --url {url} -o json --token-file <(sleep 0.2; echo secret)"
        done = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", script], capture_output=True, text=True, env=environment(), timeout=60
        )
    assert done.stderr.startswith("gpumap: what is shown") or not done.stderr
    assert json.loads(done.stdout)["version"] == 1


# --- expressions over input from outside ------------------------------------------------------------------------------

_SLUID = "s0123456789ABC"
_UUID = "a1b2c3d4-0000-0000-0000-00000000000f"
_EXPRESSIONS = [
    (dcgm_entities._COMPUTE_INSTANCE, "", "1", ""),
    (device_ids._DRA_NAMES[1][1], "gpu-0-mig-", "a", "!"),
    (device_ids._DRA_NAMES[1][1], "gpu-0-mig-a", "-1", "!"),
    (args._MATCH, "a='b'", " ", "!"),
    (args._MATCH, "a='", "\\'", ""),
    (args._MATCH, "", "a='b',", "!"),
    (re.compile(args.MATCHER), "", "a", "!"),
    (json_files._SURROGATES, b"", b"\\ud800", b"\\"),
    (workloads.LOGIN, "", "/user/a", ""),
    (workloads._SLUID_FOLDER, "", f"/{_SLUID}", ""),
    (workloads._STEPD, "", f"/{_SLUID}/step_a", ""),
    (workloads._KINDS["podman"], "/", ".service", "/libpod-payload"),
    (workloads._KINDS["containerd"], "", "/-" + "a" * 63, ""),
    (workloads._KINDS["slurm_job"], "/", "slurmstepd.scope", ""),
    (workloads._KINDS["htcondor_slot"], "/", "condor", ""),
    (workloads._KINDS["htcondor_slot"], "/htcondor/", "_slot1", ""),
    (workloads._KINDS["systemd_unit"], "/", "0", ".scope!"),
    (workloads._KINDS["systemd_unit"], "/a", "@1-", ""),
    (workloads._KINDS["systemd_unit"], "/", _UUID, ".service!"),
    (workloads._KINDS["systemd_unit"], "/run-0", "-0", "!"),
    (cgroups._POD, "", "/pod", "!"),
    (cgroups._PODLIKE, "", "kubepods", ""),
    (cgroups._PODLIKE, "/../poda/", "a-", ""),
    (cgroups._CONTAINER, "", "-0123abcd", "!"),
    (anonymize._STAT, "1 ", "(a) R 1 1", "!"),
    (anonymize._LOG_PATH, "/var/log/pods/a_a_a/", "a", "/"),
    (pseudonyms._HEX, "", "pod0123abcd-", "!"),
    (credentials._HEADER_NAME, "", "a", " "),
    (watch._UNMARKED_PASTE, "a", "\n", ""),
    (pod_labels._CAMEL, "", "aA", ""),
]


@pytest.mark.parametrize(("pattern", "start", "middle", "end"), _EXPRESSIONS)
def test_the_time_of_an_expression_is_linear(pattern: Any, start: Any, middle: Any, end: Any) -> None:
    """A text of 1 MiB takes far less than 4 s of CPU. With a quadratic expression it takes minutes."""
    text = start + middle * ((1 << 20) // len(middle)) + end
    before = signal.signal(signal.SIGVTALRM, lambda *_: pytest.fail("not linear"))
    signal.setitimer(signal.ITIMER_VIRTUAL, 4)
    try:
        pattern.fullmatch(text)
        pattern.match(text)
        for _ in pattern.finditer(text):
            pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_a_full_disk(flag: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([GPUMAP, flag], stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert (done.returncode, done.stderr) == (1, "gpumap: No space left on device\n")


def test_a_full_disk_behind_stderr() -> None:
    """The exit code is still that of the failure."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([GPUMAP, "map", "--no-such"], stderr=full, env=environment(), check=False)
    assert done.returncode == 2


def test_no_notice_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Each notice is one printable line, whatever names it contains."""
    print_notices([f"pod a{STEERING}\ud800", "b"])
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("gpumap: pod a?]0;owned??[2J? =1+1")
    assert (first.isprintable(), others) == (True, ["gpumap: b"])
