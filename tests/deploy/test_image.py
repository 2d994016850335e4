"""The image as `make image` builds it: what is in it, and that it runs as the chart's pod does."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import csv
import email
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from gpumap import __version__
from tests.agent import PATIENCE_SECONDS, Agent
from tests.demo_process import environment, fetch, listening, running, wait_for
from tests.deploy.chart import OLDEST, container_of, render
from tests.deploy.image import (
    EPOCH,
    IMAGE,
    Builder,
    Json,
    bundle,
    canonical,
    copy_source,
    locked_versions,
    mount,
    needs_root,
)
from tests.deploy.image_bases import BUILD, RUNTIME, run
from tests.machine import Node, gpu_uuid

pytestmark = pytest.mark.e2e

PACKAGES = "usr/local/lib/python3.13/dist-packages"
UNCHECKED_HASH = 1
MIB = 1 << 20


class Built(NamedTuple):
    builder: Builder
    image: str
    again: str
    root: Path
    base: frozenset[str]
    described: Json
    told: str


@pytest.fixture(name="built", scope="module")
def build_twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The image, built twice with nothing kept between, and its files mounted."""
    needs_root()
    builder = Builder(tmp_path_factory.mktemp("buildah"))
    build = builder.make_base("build", BUILD, with_dependencies=True)
    runtime = builder.make_base("runtime", RUNTIME, with_dependencies=False)
    images = f"{IMAGE}:one", f"{IMAGE}:two"
    source = copy_source(tmp_path_factory.mktemp("source"))
    told = [builder.build(source, image, build, runtime) for image in images]
    with builder.mounted(runtime) as root:
        base = frozenset(names(root))
    with builder.mounted(images[0]) as root:
        yield Built(builder, *images, root, base, builder.describe(images[0]), told[0])
    shutil.rmtree(builder.folder)


def files(root: Path, pattern: str) -> list[Path]:
    return sorted(path for path in root.rglob(pattern) if path.is_file() and not path.is_symlink())


def names(root: Path) -> Iterator[str]:
    """Yield every file and link below a folder, by its path from there."""
    for folder, folders, found in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from (str((Path(folder) / name).relative_to(root)) for name in (*found, *links))


def said(command: Sequence[str | Path]) -> str:
    """What a container says until it ends, on both of its outputs."""
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# --- what it is made of ---


def test_the_same_source_gives_the_same_image(built: Built) -> None:
    """Two builds at one SOURCE_DATE_EPOCH have the same layers and settings, byte for byte."""
    again = built.builder.describe(built.again)
    assert again["rootfs"] == built.described["rootfs"]
    assert again["config"] == built.described["config"]
    assert again["created"] == built.described["created"] == "2023-11-14T22:13:20Z"


def test_all_that_is_added_has_one_time(built: Built) -> None:
    """Nothing of ours is younger than SOURCE_DATE_EPOCH, so that no rebuild differs by a clock."""
    for place in ("usr/local", "etc/ld.so.conf", "etc/ld.so.cache"):
        times = {path.stat().st_mtime for path in [built.root / place, *(built.root / place).rglob("*")]}
        assert times == {EPOCH}, place


def test_labels_say_what_it_is(built: Built) -> None:
    """The OCI labels have name, licence, version, revision and the time of the source."""
    prefix = "org.opencontainers.image."
    labels = {name.removeprefix(prefix): value for name, value in built.described["config"]["Labels"].items()}
    assert labels["title"] == "gpumap"
    assert labels["licenses"] == "Apache-2.0"
    assert labels["version"] == __version__
    assert labels["created"] == "2023-11-14T22:13:20Z"
    assert labels["description"]
    assert labels["revision"]
    assert labels["source"]


def test_settings(built: Built) -> None:
    """It starts `gpumap serve` as user 0, exposes its port, and asks NVIDIA's runtime for NVML on all GPUs."""
    config = built.described["config"]
    assert config["Entrypoint"] == ["gpumap"]
    assert config["Cmd"] == ["serve"]
    assert config["User"] == "0:0"
    assert list(config["ExposedPorts"]) == ["9401/tcp"]
    assert {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=utility"} <= set(config["Env"])
    assert "Healthcheck" not in config


def test_nothing_builds_or_opens_a_shell(built: Built) -> None:
    """Programs are Python and gpumap; there is no shell, compiler, package manager, pip or setuptools."""
    programs = {
        path.name for folder in ("usr/bin", "usr/sbin", "usr/local/bin") for path in (built.root / folder).glob("*")
    }
    assert programs == {"python", "python3", "python3.13", "gpumap"}
    packages = {path.name.partition("-")[0] for path in (built.root / PACKAGES).iterdir()}
    assert not packages & {"pip", "setuptools", "wheel", "_distutils_hack", "pkg_resources", "grpc_tools", "pytest"}
    assert not files(built.root / "usr/lib/python3.13", "*.whl")


def test_the_loaders_files_are_there(built: Built) -> None:
    """NVIDIA's hooks find what they write to: a cache, and a folder of places that the cache's maker reads."""
    assert (built.root / "etc/ld.so.cache").read_bytes().startswith(b"glibc-ld.so.cache")
    assert (built.root / "etc/ld.so.conf").read_text() == "include /etc/ld.so.conf.d/*.conf\n"
    assert (built.root / "etc/ld.so.conf.d").is_dir()


def test_byte_code_is_complete(built: Built) -> None:
    """Each module of ours and of Python's own library has byte code that is never compared with its text."""
    for folder in (PACKAGES, "usr/lib/python3.13"):
        sources = [path for path in files(built.root / folder, "*.py") if path.parent.name != "__pycache__"]
        assert sources
        for source in sources:
            cached = source.parent / "__pycache__" / f"{source.stem}.cpython-313.pyc"
            head = cached.read_bytes()[:8]
            assert int.from_bytes(head[4:], "little") == UNCHECKED_HASH, cached


def test_the_bill_of_materials_is_the_lock(built: Built) -> None:
    """The SBOM names gpumap, and exactly what the run-time lock has, each with a purl."""
    bill = json.loads((built.root / "usr/local/share/sbom/gpumap.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["timestamp"].startswith("2023-11-14T22:13:20")
    gpumap = bill["metadata"]["component"]
    assert (gpumap["name"], gpumap["version"], gpumap["type"]) == ("gpumap", __version__, "application")
    assert {canonical(part["name"]): part["version"] for part in bill["components"]} == locked_versions()
    assert all(part["purl"].startswith("pkg:pypi/") for part in bill["components"])


def test_each_file_belongs_to_a_listed_package(built: Built) -> None:
    """The SBOM's packages are those in the image. Each file beside the base is theirs, byte for byte, or ours."""
    bill = json.loads((built.root / "usr/local/share/sbom/gpumap.cdx.json").read_text())
    listed = {(canonical(one["name"]), one["version"]) for one in [*bill["components"], bill["metadata"]["component"]]}
    installed = set()
    explained = {"usr/local/share/sbom/gpumap.cdx.json", "usr/local/bin/gpumap", "etc/ld.so.conf", "etc/ld.so.cache"}
    for folder in (built.root / PACKAGES).glob("*.dist-info"):
        about = email.message_from_string((folder / "METADATA").read_text())
        installed.add((canonical(about["Name"]), about["Version"]))
        for name, checksum, _ in csv.reader((folder / "RECORD").read_text().splitlines()):
            path = folder.parent / name
            if name.startswith("..") or path.name == "RECORD":  # a program, which the image leaves out; itself
                explained |= {f"{PACKAGES}/{name}"}
                continue
            method, _, wanted = checksum.partition("=")
            digest = base64.urlsafe_b64encode(hashlib.new(method, path.read_bytes()).digest()).rstrip(b"=").decode()
            assert digest == wanted, path
            explained |= {f"{PACKAGES}/{name}"}
    assert installed == listed
    for name in (*explained, *built.base):  # byte code of a file that a package or the base has
        module = Path(name)
        if module.suffix == ".py":
            explained.add(str(module.parent / "__pycache__" / f"{module.stem}.cpython-313.pyc"))
    assert sorted({*names(built.root)} - built.base - explained) == []


def test_its_size_is_told(built: Built, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`make image` prints the size, and the image stays small enough to be pulled by a thousand nodes at once."""
    built.builder.buildah("push", *built.builder.policy, built.image, f"oci:{tmp_path}/oci:one")
    compressed = sum(path.stat().st_size for path in files(tmp_path / "oci" / "blobs", "*"))
    unpacked = sum(path.stat().st_size for path in files(built.root, "*"))
    ours = sum(path.stat().st_size for path in files(built.root / "usr/local", "*"))
    with capsys.disabled():
        print(f"\nimage: {unpacked / 1e6:.0f} MB, {ours / 1e6:.0f} MB of it in /usr/local;", end=" ")
        print(f"{compressed / 1e6:.0f} MB compressed")
        print(built.told.splitlines()[-1])
    assert f"{IMAGE}:one: " in built.told
    assert compressed < 60e6


# --- that it runs ---


def test_it_runs_from_byte_code_alone(built: Built, tmp_path: Path) -> None:
    """A start reads no module's text: what is compiled at each start costs time and memory."""
    command = bundle(tmp_path / "b", built.root, built.described, ["demo", "--help"], PYTHONVERBOSE="1")
    told = said(command)
    assert "gpumap demo" in told
    loaded = [line for line in told.splitlines() if line.startswith("# code object from ")]
    assert len(loaded) > 50
    assert [line for line in loaded if not line.rstrip("'").endswith((".pyc", "usr/local/bin/gpumap"))] == []


def test_each_extension_loads(built: Built, tmp_path: Path) -> None:
    """The base has the libraries that the packages' compiled modules and TLS ask for."""
    modules = ["ssl"]
    for path in files(built.root / PACKAGES, "*.so"):
        *folders, name = path.relative_to(built.root / PACKAGES).parts
        modules.append(".".join([*folders, name.partition(".")[0]]))
    assert {"grpc._cython.cygrpc", "aiohttp._http_parser", "google._upb._message"} <= set(modules)
    described = {**built.described, "config": {**built.described["config"], "Entrypoint": ["python3"]}}
    told = said(bundle(tmp_path / "b", built.root, described, ["-c", f"import {', '.join(modules)}; print('all')"]))
    assert told == "all\n"


def test_version(built: Built, tmp_path: Path) -> None:
    assert said(bundle(tmp_path / "b", built.root, built.described, ["--version"])) == f"gpumap {__version__}\n"


def test_demo(built: Built, tmp_path: Path) -> None:
    """`gpumap demo` serves its simulated node from the image, with nothing mounted."""
    log = tmp_path / "log"
    command = bundle(tmp_path / "b", built.root, built.described, ["demo", "--listen", "127.0.0.1:0"])

    with running(command, log, tmp_path) as process:
        address = listening(process, log)

        def page() -> str | None:
            with contextlib.suppress(OSError):
                text = fetch(f"http://{address}/metrics")[0]
                return text if "gpumap_container_gpu_memory_used_bytes{" in text else None
            return None

        assert 'namespace="' in wait_for("page", page, process, log)


# How the driver's library comes in: where it is mounted, and what else that takes.
DRIVER = {
    "NVIDIA's runtime": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    "CDI on a host whose libraries are elsewhere": "/usr/lib64/libnvidia-ml.so.1",
    "GKE's folder": "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "a host mount": "/nvml/libnvidia-ml.so.1",
}


class Running(NamedTuple):
    """`gpumap serve` in a container."""

    agent: Agent
    runc: list[str | Path]
    container: str

    async def execute(self, *command: str) -> str:
        """What a program beside it says, as `kubectl exec` would."""
        return await asyncio.to_thread(said, [*self.runc, "exec", self.container, *command])

    def status(self) -> str:
        state = json.loads(run(*self.runc, "state", self.container))
        return Path(f"/proc/{state['pid']}/status").read_text()


@contextlib.asynccontextmanager
async def contained(built: Built, node: Node, way: str, folder: Path, user: str = "0:0") -> AsyncIterator[Running]:
    """`gpumap serve` over a node in a container of its own, with a fresh root."""
    described = {**built.described, "config": {**built.described["config"], "User": user}}
    at = DRIVER[way]
    mounts = [mount(node.directory), mount(node.library, at)]
    flags = [*node.flags, "--interval", "200ms", *(("--nvml-library", at) if way == "a host mount" else ())]
    hooks = {}
    with built.builder.mounted(built.image) as root:
        if "CDI" in way:
            # As its hook update-ldcache does: a file in /etc/ld.so.conf.d, and the host's ldconfig in the image's root.
            (folder / "nvidia.conf").write_text("/usr/lib64\n")
            mounts.append(mount(folder / "nvidia.conf", "/etc/ld.so.conf.d/00-nvcr.conf"))
            ldconfig = shutil.which("ldconfig", path="/usr/sbin:/sbin")
            words = ["ldconfig", "-r", str(root), "-f", "/etc/ld.so.conf", "-C", "/etc/ld.so.cache"]
            hooks["createContainer"] = [{"path": ldconfig, "args": words}]
        serve = ["serve", "--listen", "127.0.0.1:0", *flags]
        state = str(node.state)
        command = bundle(folder / "b", root, described, serve, mounts=mounts, hooks=hooks, STANDIN_STATE=state)
        runc, container = command[:3], str(command[-1])
        try:
            with (folder / "log").open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    *map(str, command), stdin=asyncio.subprocess.DEVNULL, stderr=errors, env=environment()
                )
            async with Agent(process, folder / "log", wrapped=False) as agent:
                yield Running(agent, runc, container)
        finally:
            run(*runc, "delete", "--force", container)


@pytest.mark.parametrize("way", DRIVER)
async def test_serves_whatever_way_the_driver_comes(built: Built, node: Node, way: str, tmp_path: Path) -> None:
    """User 0 without a capability, on a read-only root, under seccomp, reads a 0750 kubelet directory and NVML."""
    (node.kubelet_root / "pod-resources").chmod(0o750)
    pod = node.admit("train", main=[gpu_uuid(1)])
    node.run(pod.cgroup("main"), 1, 300 * MIB)
    async with contained(built, node, way, tmp_path) as container:
        page = await container.agent.until(
            lambda page: page.value("gpumap_container_gpu_memory_used_bytes", pod="train") == 300 * MIB,
            "the pod's memory is not served",
        )
        assert page.up("kubelet")
        assert page.up("nvml")
        status = container.status()
        for line in ("Uid:\t0\t0\t0\t0", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
            assert line in status, status


async def test_another_user_reads_all_but_the_kubelet(built: Built, node: Node, tmp_path: Path) -> None:
    """Without uid 0 and without a capability NVML is read; one line says why the kubelet is not."""
    (node.kubelet_root / "pod-resources").chmod(0o750)
    node.directory.chmod(0o755)
    pod = node.admit("train", main=[gpu_uuid(1)])
    node.run(pod.cgroup("main"), 1, 300 * MIB)
    node.state.chmod(0o644)
    async with contained(built, node, "a host mount", tmp_path, user="65532:65532") as container:
        page = await container.agent.until(lambda page: page.up("nvml"), "NVML is not read")
        assert not page.up("kubelet")
        assert page.value("gpumap_device_memory_used_bytes", uuid=gpu_uuid(1))
        assert page.value("gpumap_source_errors_total", source="kubelet", reason="permission_denied")
        assert page.samples.get("gpumap_allocation_info") is None
        for owner in ("assigned", "unassigned", "gone"):
            assert page.value("gpumap_device_memory_used_by_owner_bytes", owner=owner, uuid=gpu_uuid(1)) is None
        (line,) = [line for line in container.agent.log.splitlines() if "source down source=kubelet" in line]
        path = node.kubelet_root / "pod-resources/kubelet.sock"
        reason = f"reason=permission_denied detail='uid 65532 has no permission to connect to {path}'"
        assert line.endswith(reason)
        status = container.status()
        for line in ("Uid:\t65532\t65532\t65532\t65532", "CapEff:\t0000000000000000"):
            assert line in status, status


async def test_commands_beside_it(built: Built, node: Node, tmp_path: Path) -> None:
    """What `kubectl exec` asks for runs without a shell; `gpumap record` writes to /tmp, and / cannot be written."""
    node.admit("train", main=[gpu_uuid(1)])
    async with contained(built, node, "a host mount", tmp_path) as container:
        assert "train" in await container.execute("gpumap", "map", *node.flags)
        assert "/tmp/capture" in await container.execute("gpumap", "record", "/tmp/capture", *node.flags)
        read_only = "import os; print(bool(os.statvfs('/').f_flag & os.ST_RDONLY))"
        assert await container.execute("python3", "-c", read_only) == "True\n"
        before_its_end = container_of(render(version=OLDEST))["lifecycle"]["preStop"]["exec"]["command"]
        assert await container.execute(*before_its_end) == ""
