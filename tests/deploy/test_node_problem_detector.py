"""deploy/node-problem-detector: its configuration by node-problem-detector's rules, its script against real agents."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from aiohttp import web

from gpumap.model.check import LINE_BYTES
from gpumap.model.names import GPU_CONDITIONS
from tests.agent import run_agent
from tests.deploy.chart import render

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "node-problem-detector"
SCRIPT = FOLDER / "gpumap-check.sh"
CONFIG: dict[str, Any] = json.loads((FOLDER / "gpumap.json").read_text(encoding="utf-8"))
GUIDE = (ROOT / "docs" / "how-to" / "node-conditions.md").read_text(encoding="utf-8")
CAPTURES = ROOT / "tests" / "captures"
DEADLINE_SECONDS = 60.0


def seconds(text: str) -> float:
    """A duration of Go, as far as the file has such."""
    match = re.fullmatch(r"(\d+)s", text)
    assert match is not None, text
    return float(match[1])


def test_node_problem_detector_accepts_the_configuration() -> None:
    """The rules of Validate() in pkg/custompluginmonitor/types/config.go; no default condition says that all is well
    before the first answer."""
    settings = CONFIG["pluginConfig"]
    assert CONFIG["plugin"] == "custom"
    types = [one["type"] for one in CONFIG["conditions"]]
    assert len(types) == len({*types})
    assert settings["max_output_length"] == LINE_BYTES
    assert settings["skip_initial_status"] is settings["enable_message_change_based_condition_update"] is True
    for rule in CONFIG["rules"]:
        assert seconds(rule["timeout"]) <= seconds(settings["timeout"]) < seconds(settings["invoke_interval"])
        assert rule["type"] == "permanent"
        assert Path(rule["path"]).name == SCRIPT.name
    assert [rule["condition"] for rule in CONFIG["rules"]] == types
    assert [rule["args"] for rule in CONFIG["rules"]] == [[name] for name in GPU_CONDITIONS]
    reasons = [one["reason"] for one in (*CONFIG["conditions"], *CONFIG["rules"])]
    assert all(re.fullmatch(r"[A-Z][A-Za-z]+", reason) for reason in (*types, *reasons))
    assert SCRIPT.stat().st_mode & 0o111 == 0o111
    waits = {float(found) for found in re.findall(r"(?:--max-time|timeout) (\d+)", SCRIPT.read_text(encoding="utf-8"))}
    assert all(one < seconds(settings["timeout"]) for one in waits), "it ends before it is killed"
    assert len(waits) == 1


def test_conditions_are_named_as_the_alerts() -> None:
    """The runbook of the alert is the condition's."""
    for one in CONFIG["conditions"]:
        assert (ROOT / "docs" / "runbooks" / f"{one['type']}.md").is_file()
        assert f"`{one['type']}`" in GUIDE


def test_the_service_reaches_the_agent_of_the_node_only() -> None:
    """It selects the chart's pods and their port, and no other node's."""
    service = yaml.safe_load((FOLDER / "service.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(service, "1.31", strict=True)
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    pods = render()["DaemonSet"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] in [one["name"] for one in pods["spec"]["containers"][0]["ports"]]
    assert f"{service['metadata']['name']}.{service['metadata']['namespace']}" in GUIDE


def test_the_patch_has_all_that_the_script_needs() -> None:
    """The pod of node-problem-detector: the folder of the rules, executable, and both variables."""
    pod = yaml.safe_load((FOLDER / "patch.yaml").read_text(encoding="utf-8"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert {str(Path(rule["path"]).parent) for rule in CONFIG["rules"]} == {mount["mountPath"]}
    assert mount["name"] == volume["name"]
    assert volume["configMap"]["defaultMode"] & 0o111 == 0o111
    assert f"--config.custom-plugin-monitor={mount['mountPath']}/gpumap.json" in container["command"]
    env = {one["name"]: one for one in container["env"]}
    assert env["GPUMAP_URL"]["value"].startswith("http://gpumap-of-node.gpumap")
    assert env["NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


CLIENTS = [("curl",), ("wget", "timeout"), ("bash", "timeout")]


@pytest.fixture(name="path", params=CLIENTS, ids=lambda names: names[0])
def one_client(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A PATH with one way to ask. node-problem-detector's image has only the last."""
    for name in request.param:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"there is no {name}")
        (tmp_path / name).symlink_to(found)
    return str(tmp_path)


async def run(path: str, url: str, *arguments: str, node: str = "") -> tuple[int | None, str]:
    """Its exit code and its line, as node-problem-detector takes them."""
    variables = {"PATH": path, "GPUMAP_URL": url, "NODE_NAME": node}
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", str(SCRIPT), *arguments, env=variables, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    line = out.decode()
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert len(line.strip()) <= LINE_BYTES
    return process.returncode, line.strip()


async def test_the_script_asks_an_ipv6_address(path: str) -> None:
    """Bash connects to an address without its brackets."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6")
    async with run_agent("demo", "--listen", "[::1]:0", "--interval", "200ms") as agent:
        await agent.until(lambda page: page.up("nvml"), "NVML does not answer")
        assert await run(path, agent.url, "down") == (0, "8 GPUs well (down)")


async def test_the_script_asks_an_agent(path: str) -> None:
    """Well, a problem, the agent of another node, no agent."""
    async with run_agent("demo", "--interval", "200ms") as agent:
        await agent.until(lambda page: page.up("nvml"), "NVML does not answer")
        assert await run(path, agent.url, "down", node="demo-node") == (0, "8 GPUs well (down)")
        assert await run(path, f"{agent.url}/", node="") == (1, "GPU 5 needs a reset to replace bad memory rows")
        assert await run(path, agent.url, "row_remap_pending") == (1, "GPU 5 needs a reset to replace bad memory rows")
        assert await run(path, agent.url, "down", node="b") == (2, "the gpumap of node demo-node answers, not of b")
        assert (await run(path, agent.url, "bogus"))[0] == 2
        url = agent.url
    assert await run(path, url, "down") == (2, f"gpumap does not answer at {url}")


async def test_the_script_without_a_driver(path: str) -> None:
    """It is unknown whether the GPUs work."""
    async with run_agent("demo", "--capture", str(CAPTURES / "nvml-down")) as agent:
        await agent.later(1)
        assert await run(path, agent.url, "down") == (2, "NVML does not answer: driver_not_loaded")


@pytest.mark.parametrize("answer", ["", "1", "3 x", "well", "10 x", "<html>1 x</html>"])
async def test_the_script_asks_something_else(path: str, answer: str) -> None:
    """Another server, and whatever it answers, is no problem of a GPU."""

    async def answering(request: web.Request) -> web.Response:
        return web.Response(text=answer)

    app = web.Application()
    app.router.add_get("/api/v1/check", answering)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        assert await run(path, f"http://{host}:{port}", "down") == (
            2,
            f"gpumap does not answer at http://{host}:{port}",
        )
    finally:
        await runner.cleanup()


async def test_the_script_asks_a_server_that_hangs(path: str) -> None:
    """It ends by itself, with 2, before node-problem-detector kills it."""
    held: list[asyncio.StreamWriter] = []

    def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        assert await run(path, f"http://{host}:{port}", "down") == (
            2,
            f"gpumap does not answer at http://{host}:{port}",
        )
    finally:
        for writer in held:
            writer.close()
        server.close()
