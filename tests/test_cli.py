"""The installed `gpumap` command as its user meets it: exit codes, one line for each mistake, and never a traceback."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from gpumap import __version__
from gpumap.agent.flags import FLAGS
from gpumap.cli.parser import Parser, parse
from gpumap.dispatch import command_parser
from tests import standin
from tests.agent import PATIENCE_SECONDS, gone, run_agent, serve
from tests.command import gpumap, gpumap_in_loop, one_line, run_command, run_command_in_loop
from tests.demo_process import GPUMAP, environment
from tests.machine import GIB, Node, gpu_uuid, short_directory
from tests.processes import PlainProcesses

WHOLE = gpu_uuid(1)


@pytest.fixture(name="node")
async def make_node(library: Path) -> AsyncIterator[Node]:
    """A node with one pod that uses 11 GiB of the GPU that it holds."""
    with short_directory() as directory:
        node = Node(directory, library, PlainProcesses(directory / "proc"))
        pod = node.admit("whole", main=[WHOLE])
        node.run(pod.cgroup("main"), 1, 11 * GIB)
        async with node.kubelet:
            yield node


# --- what it says of itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(word: str) -> None:
    done = run_command(word)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gpumap {__version__}\n", "")


def subcommands(parser: Parser) -> dict[str, Parser]:
    """The parsers of the commands that the help shows."""
    (found,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return {message.dest: found.choices[message.dest] for message in found._choices_actions}


COMMANDS = subcommands(command_parser())
SOURCES = {flag.name for flag in FLAGS if flag.about in ("sources", "log")}


def test_help_lists_the_commands() -> None:
    """A line each, none broken by a long name."""
    top = run_command("--help", COLUMNS="120")
    assert (top.returncode, top.stderr) == (0, "")
    offered = re.findall(r"^    (\w+)  +\w", top.stdout, re.MULTILINE)
    assert offered == [
        "map",
        "top",
        "waste",
        "inspect",
        "bill",
        "doctor",
        "check",
        "serve",
        "record",
        "demo",
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str) -> None:
    """A line on what it does, flags by what they are about, the useful ones first, and an example that is one."""
    done = run_command(command, "--help", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(len(line) <= 100 for line in done.stdout.splitlines() if "|" not in line)
    assert done.stdout.startswith(f"usage: gpumap {command} ")
    for example in re.findall(r"^  (?:source <\()?(gpumap .*?)(?:\)? +#.*| [|>].*)?$", done.stdout, re.MULTILINE):
        words = ["/tmp/node" if word in ("DIR", "node.yaml") else word for word in shlex.split(example.rstrip(")"))]
        assert parse(command_parser(), words[1:]).command == command
    parts = re.findall(r"^(\w.*):$", done.stdout, re.MULTILINE)
    if "where this node's sources are" in parts and command not in ("serve", "demo"):
        assert parts.index("where this node's sources are") > min(
            parts.index(part) for part in parts if part != "options"
        )


@pytest.mark.parametrize(("command", "takes"), [("serve", {flag.name for flag in FLAGS}), ("map", SOURCES)])
def test_help_lists_each_flag(command: str, takes: set[str]) -> None:
    """Every flag that a command takes, with its default and variable; those of no use to it are not there."""
    every = "--help-all" if command == "map" else "--help"
    words = " ".join(run_command(command, every, COLUMNS="100").stdout.split())
    for flag in FLAGS:
        assert (f"${flag.variable})" in words) == (flag.name in takes)


def test_help_names_the_sums_that_require_a_server() -> None:
    maps, waste = (" ".join(run_command(command, "--help").stdout.split()) for command in ("map", "waste"))
    assert "--by WHAT With --prometheus: show sums by namespace or by node." in maps
    assert "--by WHAT Show sums by namespace or by node." in waste


def test_without_a_command_help_is_shown() -> None:
    """On stderr, with 2: a container that has lost its arguments must not look as if it had done its work."""
    done = run_command()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == run_command("--help").stdout


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_may_be_cut_off(arguments: list[str]) -> None:
    """The reader closes the pipe early: it ends without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [str(GPUMAP), *arguments], stdout=pipe, stderr=subprocess.PIPE, env=environment(), check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


async def test_the_installed_commands(demo_url: str) -> None:
    """What other tests call does its work as the installed program too."""
    commands = ("map", "top", "waste", "inspect", "doctor")
    runs = await asyncio.gather(*(gpumap_in_loop(command, "--url", demo_url) for command in commands))
    assert [done.returncode for done in runs] == [0] * len(commands)
    assert all(done.stdout.count("\n") > 1 for done in runs)
    refused = one_line(gpumap("bill", "--from", "1h", "--prometheus", "http://127.0.0.1:9"), 1)
    assert refused == "http://127.0.0.1:9 did not answer: connection refused"


# --- mistakes ---------------------------------------------------------------------------------------------------------


_SUMS = ("map", "--prometheus", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("paint",), 'unknown command "paint"; see gpumap --help'),
        (("--url", "http://x", "top"), "flags come after the command: gpumap top --url http://x"),
        (("mpa",), "did you mean map?"),
        (("--watch", "wast"), "did you mean waste?"),
        (("map", "--watc"), "unknown flag --watc; did you mean --watch?; see gpumap map --help"),
        (("serve", "--intervall", "5s"), "did you mean --interval?"),
        (("map", "--listen", ":1"), "unknown flag --listen"),
        (("map", "--gpu", "3"), "unknown flag --gpu; did you mean gpu:3?"),
        (("top", "-i", "3"), "unknown flag -i; did you mean gpu:3?"),
        (("doctor", "--pod=web"), "unknown flag --pod; did you mean gpumap map pod:web?"),
        (("doctor", "gpu:3"), 'unexpected argument "gpu:3"; did you mean gpumap map gpu:3?'),
        (("gpu:3",), 'unknown command "gpu:3"; did you mean gpumap map gpu:3?'),
        (("map", "--prometheus", "http://a", "gpu:3"), "gpu:3: map --prometheus shows sums"),
        (("top", "--sort-by", "mem"), "did you mean memory?"),
        (("map", "--sort-by", "pid"), 'unknown value "pid"; valid values: namespace, memory, '),
        (("doctor", "-o", "yaml"), '-o/--output: unknown value "yaml"; valid values: table, json'),
        (("map", "--interval", "0s"), "--interval 0s: must be longer than zero"),
        (("top", "--prometheus", "http://a"), "unknown flag --prometheus"),
        (("waste", "--would-fit"), "unknown flag --would-fit"),
        (("map", "--all"), "unknown flag --all; did you mean"),
        (("waste", "--node", "a"), "unknown flag --node"),
        (("waste", "--label-match", "a"), "unknown flag --label-match"),
        (("waste", "--by", "workload"), '--by: unknown value "workload"; valid values: namespace, node'),
        (("map", "--by", "node"), "--by requires --prometheus"),
        ((*_SUMS, "-n", "ml"), "--namespace ml: map --prometheus shows sums (--by namespace)"),
        ((*_SUMS, "-o", "name"), "-o name: map --prometheus shows sums"),
        ((*_SUMS, "--sort-by", "peak"), "--sort-by peak: not a column of sums by node; valid values: node, all, gpus"),
        (("waste", *_SUMS[1:], "--by", "node", "--sort-by", "gpus"), "--sort-by sorts findings, but --by prints no"),
        (("serve", "--grace", "-5m"), '--grace -5m: "-5m" is not a duration'),
        (("waste", "--by", "namespace", "-o", "name"), "--by namespace: prints sums, but -o name prints pods"),
        (("map", "-n", "-A"), "-n/--namespace: requires a value"),
        (("help", "wast"), 'unknown command "wast"; did you mean waste?'),
        (("map", "--url", "http://127.0.0.1:99999"), "Port out of range 0-65535"),
        (("map", "--prometheus", "http://prom:port"), "port can't be converted to integer"),
        (("map", "--url", "http://"), "--url http://: is not a URL with the name or address of a host"),
        (("map", "--url", "http://a..b"), "is not a URL with the name or address of a host"),
        (("map", "--url", "http://a\0b"), "is not a URL with the name or address of a host"),
        (("map", "--url", "http://a", "--proc", "/proc"), "--proc: sets a source of this node"),
        (("top", "--url", "http://a", "--node-name", "x"), "--node-name: sets a source of this node"),
        (("serve", "--interval", "5\ns"), '--interval 5 s: "5 s" is not a duration'),
        (("serve", "more"), "more"),
        (("serve", "--proc", "/etc/passwd"), "--proc /etc/passwd: is not a directory"),
        (("serve", "--listen", "no.such.host.invalid:1"), "--listen no.such.host.invalid:1: "),
        (("serve", "--listen", f"{'x' * 70}.a:1"), "--listen "),
        (("serve", "--listen", f"{'ä' * 70}:1"), f"--listen {'ä' * 70}:1: is not a host name"),
        (("demo", "--scenario", "/no/such/file"), "--scenario /no/such/file"),
        (("demo", "--capture", "/no/such/folder"), "--capture /no/such/folder"),
        (("demo", "--capture", "x", "--scenario", "y"), "--capture: cannot be combined with --scenario"),
        (("record", "/tmp/x", "--for", "soon"), '--for soon: "soon" is not a duration'),
        (("demo", "--collect", "all,none"), '--collect: unknown value "all,none"'),
        (("map", "--kubelet-root", "/etc/passwd"), "--kubelet-root /etc/passwd: is not a directory"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in one_line(run_command(*arguments), 2)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "$GPUMAP_URL agent: must start with http:// or https://"),
        (
            ("--proc", "/"),
            "--proc: sets a source of this node, but $GPUMAP_URL asks an agent with its own sources; "
            "--url '' asks this node",
        ),
        (("--url", "", "--proc", "/dev/null"), "--proc /dev/null: is not a directory"),
        (("--url", "ftp://b"), "--url ftp://b: must start with http:// or https://"),
        (("--prometheus", "ftp://b"), "--prometheus ftp://b: must start with http:// or https://"),
    ],
)
def test_the_variable_of_the_agent_is_named(flags: tuple[str, ...], expected: str) -> None:
    """The chart sets it in the agent's pod. A flag takes precedence, and --url '' is this node."""
    assert one_line(run_command("map", *flags, GPUMAP_URL="agent"), 2) == expected


def test_the_demo_warns_of_an_unknown_variable() -> None:
    """As `serve` does: a mistyped variable is a line of the log."""
    output = run_command(
        "demo", "--scenario", "/no/such/file", GPUMAP_INTERVALL="1s", GPUMAP_URL="http://127.0.0.1:9401"
    ).stderr
    assert output.count("WARNING") == 1
    assert "WARNING unknown variable ignored variable=GPUMAP_INTERVALL nearest=GPUMAP_INTERVAL" in output


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_busy_port_is_a_mistake(command: str) -> None:
    """Exit code 2, with the flag, or the variable, that named the port."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        reason = "Address already in use; choose another address with --listen"
        assert one_line(run_command(command, "--listen", address), 2) == f"--listen {address}: {reason}"
        message = one_line(run_command(command, GPUMAP_LISTEN=address), 2)
        assert message == f"--listen (from $GPUMAP_LISTEN={address}): {reason}"


@pytest.mark.parametrize("words", [(), ("waste",)])
def test_help_is_also_a_command(words: tuple[str, ...]) -> None:
    assert run_command("help", *words).stdout == run_command(*words, "--help").stdout != ""


# --- its life ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_service(node: Node, number: signal.Signals) -> None:
    """SIGTERM and SIGINT: exit code 0 in a second or two, also with clients that hang on; no process is left."""
    async with serve(node) as agent:
        await agent.later(1)
        children = agent.children()
        _, writer = await asyncio.open_connection("127.0.0.1", int(agent.url.rpartition(":")[2]))
        began = time.monotonic()
        assert await agent.stop(number) == 0
        assert time.monotonic() - began < 5.0
        assert agent.log.endswith("INFO stopped\n")
        writer.close()
        await gone(*children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_demo(number: signal.Signals) -> None:
    """The demo ends as the service does, and takes its simulated node with it."""
    with short_directory() as temporary:
        async with run_agent("demo", TMPDIR=str(temporary)) as agent:
            assert list(temporary.iterdir())
            assert await agent.stop(number) == 0
        assert list(temporary.iterdir()) == []


async def test_the_demo_runs_where_temporary_folders_have_long_names(tmp_path: Path) -> None:
    """A Unix socket's path has little room: a long TMPDIR does not keep the demo from starting."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    async with run_agent("demo", TMPDIR=str(long)) as agent:
        page = await agent.later(1)
        assert page.up("kubelet")


@pytest.mark.parametrize("command", ["serve", "demo"])
async def test_a_signal_while_it_starts(command: str) -> None:
    """However early SIGTERM comes, it ends in silence and leaves nothing behind."""
    with short_directory() as temporary:
        delays_seconds = (0.1, 0.25, 0.4, 0.6, 0.9)
        await asyncio.gather(*(_end_while_it_starts(command, temporary, delay) for delay in delays_seconds))
        assert list(temporary.iterdir()) == []


async def _end_while_it_starts(command: str, temporary: Path, delay_seconds: float) -> None:
    process = await asyncio.create_subprocess_exec(
        *(str(GPUMAP), command, "--listen", "127.0.0.1:0"),
        env=environment(TMPDIR=str(temporary)),
        stderr=subprocess.PIPE,
    )
    await asyncio.sleep(delay_seconds)
    process.terminate()
    _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert process.returncode in (0, -signal.SIGTERM)  # the latter before Python has come to gpumap's first line
    assert b"Traceback" not in errors


COMPUTING = """
import asyncio, re
from gpumap.agent.own_process import stop_by_signal
from gpumap.cli import main
async def compute(prepare=lambda: None):
    prepare()
    print(flush=True)
    re.match("(a+)+b", "a" * 99)
main._END_SECONDS = {seconds}
asyncio.run({run})
"""


@pytest.mark.parametrize(
    ("run", "seconds", "again", "code"),
    [
        ("main.until_stopped(compute())", 0.1, None, 0),
        ("main.until_stopped(compute())", 99.0, signal.SIGINT, 0),
        ("compute(stop_by_signal)", 99.0, signal.SIGINT, -signal.SIGINT),
    ],
)
def test_signals_end_what_computes(run: str, seconds: float, again: signal.Signals | None, code: int) -> None:
    """The event loop waits for a regular expression. A command ends in time, and all end on the second signal."""
    program = COMPUTING.format(run=run, seconds=seconds)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            if again is not None:
                process.send_signal(again)
        process.kill()
    assert process.returncode == code


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_the_address_is_logged(node: Node) -> None:
    """Port 0 becomes a real one, in the log; an IPv6 address is in brackets, and can be asked."""
    async with serve(node, "--listen", "[::1]:0") as agent:
        assert re.search(r"INFO serving address=\[::1\]:[1-9]\d* node=\S+ version=", agent.log)
        assert (await agent.get("/healthz")).status == 200


@pytest.mark.parametrize("form", ["text", "json"])
async def test_the_log_is_a_line_an_event(node: Node, form: str) -> None:
    """As text or as JSON, in UTC: what a client sends, or a source fails with, makes no line more than that."""
    async with serve(node, "--log-format", form) as agent:
        await agent.later(1)
        for nonsense in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\nA\r\n\r\n", b"\x16\x03\x01\x02\x00"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(agent.url.rpartition(":")[2]))
            writer.write(nonsense)
            writer.write_eof()
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(reader.read(), 5)
            writer.close()
        await node.kubelet.stop()
        await agent.until(lambda page: not page.up("kubelet"), "its absence is not reported")
        await agent.stop()
        lines = agent.log.splitlines()
    if form == "json":
        events = [json.loads(line) for line in lines]
        assert all(event.keys() == {"time", "level", "message"} for event in events)
        assert events[-1]["message"] == "stopped"
        assert {event["level"] for event in events} <= {"info", "warning", "error"}
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"]) for event in events)
    else:
        pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) \S.*"
        assert [line for line in lines if not re.fullmatch(pattern, line)] == []
    assert sum("source down source=kubelet" in line for line in lines) == 1


async def test_a_quiet_node_makes_a_quiet_log() -> None:
    async with run_agent("demo", "--interval", "200ms") as agent:
        await agent.later(3)
        settled = agent.log
        await agent.later(2)
        assert "ERROR" not in settled
        assert len(agent.log.splitlines()) - len(settled.splitlines()) <= 2, "a line only when something changes"


# --- map --------------------------------------------------------------------------------------------------------------


def local(node: Node) -> list[str]:
    return ["map", *node.flags, "--nvml-library", str(node.library)]


async def test_map_of_this_node(node: Node) -> None:
    """Without --url it collects twice here; every form has the same values, and nothing is logged."""
    variables = standin.environment(node.library, node.state)
    forms = ("table", "wide", "json", "yaml")
    runs = await asyncio.gather(*(run_command_in_loop(*local(node), "-o", form, **variables) for form in forms))
    assert [(done.returncode, done.stderr) for done in runs] == [(0, "")] * len(forms)
    outputs = dict(zip(forms, (done.stdout for done in runs), strict=True))
    for form in ("json", "yaml"):
        document = json.loads(outputs[form]) if form == "json" else yaml.safe_load(outputs[form])
        device = next(device for device in document["devices"] if device["uuid"] == WHOLE)
        assert device["containers"][0]["use"]["memory_bytes"] == 11 * GIB
    for form in ("table", "wide"):
        rows = outputs[form].splitlines()
        assert rows[0].split()[:4] == ["DEVICE", "NAMESPACE", "POD", "CONTAINER"]
        row = next(line for line in rows if "whole " in line and "free" not in line)
        assert "11.0GiB" in row
        assert "assigned" in row
        assert all(line == line.rstrip() for line in rows)
    assert "MODEL" in outputs["wide"]


async def test_map_where_nothing_answers(directory: Path) -> None:
    """No kubelet and no driver: it says which, and exits with 1."""
    missing = str(directory / "missing")
    sources = ("--kubelet-root", "--device-checkpoint", "--nvml-library", "--pod-log-root")
    done = await run_command_in_loop("map", *(word for flag in sources for word in (flag, missing)))
    assert done.returncode == 1
    assert done.stderr.endswith(": neither its kubelet nor NVML answers\n")
    assert len(done.stderr.splitlines()) == 1
    assert "No devices." in done.stdout
    assert "kubelet is down: socket_missing" in done.stdout
    assert "nvml is down: library_not_found" in done.stdout


async def test_map_may_be_cut_off(demo_url: str) -> None:
    """`gpumap map | head -1`, with and without --watch: it ends without a word when its reader ends."""
    once = f'"{GPUMAP}" map -o json --url {demo_url}'
    for command in (once, f"{once} --watch --interval 100ms"):
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", f"{command} | head -1; echo ${{PIPESTATUS[0]}}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        out, errors = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
        assert (out, errors) == (b"{\n0\n", b"")


@pytest.mark.parametrize("command", ["map", "top", "waste", "doctor"])
async def test_only_what_is_used_is_checked(demo_url: str, command: str) -> None:
    """Where an agent is asked, this node's variables do not matter; where this node is, those of `serve` do not."""
    wrong = {"GPUMAP_PROC": "/etc/passwd", "GPUMAP_KUBELET_ROOT": "/etc/passwd", "GPUMAP_RESOURCE": "("}
    done = await run_command_in_loop(command, "--url", demo_url, GPUMAP_LISTEN="x", GPUMAP_PUSH="1", **wrong)
    assert (done.returncode, done.stderr) == (0, "")
    done = await run_command_in_loop(command, GPUMAP_LISTEN="x", GPUMAP_DIALECT="x", GPUMAP_PROC="/etc/passwd")
    assert one_line(done, 2) == "--proc (from $GPUMAP_PROC=/etc/passwd): is not a directory"


# --- mistakes of who asks, and of who answers -------------------------------------------------------------------------


def test_closed_standard_output() -> None:
    """`gpumap map >&-`: one line, exit code 1."""
    done = subprocess.run(
        ["bash", "-c", f'"{GPUMAP}" map >&-'], env=environment(), capture_output=True, text=True, check=False
    )
    assert one_line(done, 1) == "standard output is closed"
