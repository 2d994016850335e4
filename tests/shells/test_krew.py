"""What krew would install: the archive by the manifest's rules, run by the real kubectl with nothing but Python.

krew itself is not to be had here: the manifest is checked by the rules of its `internal/index/validation/validate.go`,
and files are placed as its `internal/installation/move.go` does.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumap import __version__
from scripts.make_krew import (
    HALF,
    MANIFEST,
    NATIVE,
    NATIVE_PLATFORMS,
    NEWEST,
    OLDEST,
    PURE,
    filled,
    locked,
)
from tests.demo_process import demo, environment
from tests.shells.api_server import JANE, ApiServer, PlayedPod
from tests.tools import tool

ROOT = Path(__file__).resolve().parents[2]
COMMAND_SECONDS = 300.0
URI = "https://example.invalid/kubectl-gpumap.tar.gz"


def valid(manifest: dict[str, Any]) -> dict[str, Any]:
    """Check what krew checks, and give the only platform."""
    assert manifest["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert manifest["kind"] == "Plugin"
    assert manifest["metadata"] == {"name": "gpumap"}
    spec = manifest["spec"]
    assert set(spec) == {"version", "homepage", "shortDescription", "description", "caveats", "platforms"}
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert "\n" not in spec["shortDescription"]
    (platform,) = spec["platforms"]
    assert re.fullmatch(r"[a-f0-9]{64}", platform["sha256"])
    assert platform["uri"].endswith(".tar.gz")
    assert {one["key"] for one in platform["selector"]["matchExpressions"]} == {"os", "arch"}
    for file in platform["files"]:
        assert os.path.normpath(file["to"]) == file["to"]
    found: dict[str, Any] = platform
    return found


def test_the_manifest_is_one_of_krews() -> None:
    """Filled in, it has what krew asks for, the package's version, and no mark that was left."""
    text = filled(MANIFEST.read_text(), URI, hashlib.sha256(b"").hexdigest())
    assert "$" not in text
    manifest = yaml.safe_load(text)
    assert valid(manifest)["uri"] == URI
    assert manifest["spec"]["version"] == f"v{__version__}"
    assert MANIFEST.stem == manifest["metadata"]["name"]


def test_the_packages_are_those_of_the_lock() -> None:
    """Each is locked with its hashes; and none of the lock is forgotten but those that only a node needs."""
    lock = (ROOT / "requirements.lock").read_text()
    assert all("--hash=sha256:" in locked(lock, name) for name in (*PURE, *HALF, *NATIVE))
    left_out = set(re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)) - {*PURE, *HALF, *NATIVE}
    assert left_out == {
        *("bcrypt", "grpcio", "nvidia-ml-py", "prometheus-client", "protobuf"),
    }


def make(into: Path) -> Path:
    """Build as `make krew` does, and give the folder."""
    script = (sys.executable, str(ROOT / "scripts" / "make_krew.py"), "--into", str(into), "--uri", URI)
    subprocess.run(script, env=environment(), check=True, capture_output=True, timeout=COMMAND_SECONDS)
    return into


@pytest.fixture(name="built", scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("built"))


@pytest.fixture(name="installed", scope="module")
def install(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Placed as krew does. Gives the folder of its commands."""
    platform = valid(yaml.safe_load((built / "gpumap.yaml").read_text()))
    root = tmp_path_factory.mktemp("krew")
    (archive,) = built.glob("*.tar.gz")
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == platform["sha256"]
    unpacked, store, commands = root / "unpacked", root / "store", root / "bin"
    for folder in (unpacked, store, commands):
        folder.mkdir()
    with tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
    for file in platform["files"]:
        target = Path(file["from"]).name if file["to"] == "." else file["to"]
        shutil.move(unpacked / file["from"], store / target)
    assert os.listdir(unpacked) == [], "what no rule takes is not installed"
    (commands / "kubectl-gpumap").symlink_to(store / platform["bin"])
    return commands


@pytest.fixture(name="api")
async def play_cluster(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> AsyncIterator[ApiServer]:
    """A cluster of one node."""
    api = ApiServer(directory)
    with demo(tmp_path_factory.mktemp("gpu-1"), "--node-name", "gpu-1") as url:
        api.pods = [PlayedPod("gpu-1", "gpumap-a", url)]
        async with api.running():
            api.write_kubeconfig(jane=(JANE, "ml-team", ""))
            yield api


@pytest.mark.e2e
def test_the_same_inputs_make_the_same_archive(built: Path, tmp_path: Path) -> None:
    """A second build can be compared with the first."""
    (before,), (archive,) = built.glob("*.tar.gz"), make(tmp_path).glob("*.tar.gz")
    assert archive.read_bytes() == before.read_bytes()
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    compiled = [name for name in names if name.endswith((".so", ".pyd", ".pyc"))]
    folders = [name.split("/")[2] for name in compiled if name.startswith("lib/native/")]
    assert sorted(folders) == sorted([*NATIVE_PLATFORMS] * (NEWEST - OLDEST + 1) * len(NATIVE))
    assert len(folders) == len(compiled)
    not_ours = ("grpc", "google", "pynvml", "gpumap/agent", "gpumap/lab")
    assert not [name for name in names if name.startswith(tuple(f"lib/{one}" for one in not_ours))]
    licences = {name.split("/")[1].partition("-")[0] for name in names if "LICEN" in name and name.startswith("lib/")}
    assert licences >= {name.replace("-", "_") for name in (*PURE, *HALF, *NATIVE)}


@pytest.mark.e2e
@pytest.mark.parametrize("minor", range(OLDEST, NEWEST + 1))
def test_each_python_runs_it(installed: Path, minor: int) -> None:
    """With nothing but the archive: -I leaves out the user's packages, -S all that are installed."""
    name = shutil.which(f"python3.{minor}") or ""
    command = [name, "-c", "import sys; print(sys.executable)"]  # `name` may be a script that starts it
    found = subprocess.run(command, capture_output=True, text=True, check=False) if name else None
    if found is None or found.returncode:
        pytest.skip(f"no Python 3.{minor} here")
    words = [found.stdout.strip(), "-I", "-S", str(installed / "kubectl-gpumap"), "top", "-A"]
    done = subprocess.run(words, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False)
    expected = "gpumap: kubectl is not on PATH. gpumap uses it to log in to the API server\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


@pytest.mark.e2e
async def test_the_installed_plugin_runs(installed: Path, api: ApiServer, tmp_path: Path) -> None:
    """kubectl runs it from krew's folder, with a Python that has no package of its own."""
    kubectl = tool("kubectl")
    path = os.pathsep.join([str(installed), str(kubectl.parent), os.environ["PATH"]])
    places = {"PATH": path, "HOME": str(tmp_path), "KUBECONFIG": str(api.kubeconfig), "PYTHONNOUSERSITE": "1"}
    for words in (("top", "gpu-1", "-A"), ("waste", "gpu-1", "-A", "-o", "yaml"), ("map", "gpu-1", "-A", "-o", "json")):
        process = await run_beside([str(kubectl), "gpumap", *words], environment(**places))
        assert (process.returncode, process.stderr) == (0, ""), process
        assert "trainer" in process.stdout


async def run_beside(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command while this process serves what it asks."""
    return await asyncio.to_thread(
        subprocess.run,
        command,
        env=variables,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        stdin=subprocess.DEVNULL,
        check=False,
    )
