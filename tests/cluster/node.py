"""A live node: containerd and the kubelet, only with static pods, in namespaces and cgroups of their own.

Nothing of the machine's is read or written. The kubelet's cgroups lie below one cgroup per node, and the node's own
`/var/lib/kubelet`, `/var/log/pods`, `/var/log/containers`, `/run/containerd` and `/var/lib/containerd` hide the
machine's. `tests/cluster/namespaces.py` makes these, and removes them however the test ends.

All paths of the node are as on any node ("/var/lib/kubelet/pod-resources/kubelet.sock"). `LiveNode.path` gives the path
for this process. All PIDs are the node's, as a pod with `hostPID` sees them.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import grpc
import yaml

from tests.cluster import namespaces
from tests.demo_process import environment
from tests.tools import tool

T = TypeVar("T")

NODE_NAME = namespaces.NODE_NAME  # a static pod's name ends in it: "-live-node"
PAUSE_IMAGE = "localhost/gpumap-test/pause:1"
BUSYBOX_IMAGE = "localhost/gpumap-test/busybox:1"
KUBELET_DIRECTORY = Path("/var/lib/kubelet")
DEVICE_PLUGINS = KUBELET_DIRECTORY / "device-plugins"
MANIFESTS = KUBELET_DIRECTORY / "manifests"
POD_RESOURCES_SOCKET = KUBELET_DIRECTORY / "pod-resources/kubelet.sock"
CONTAINERD_SOCKET = Path("/run/containerd/containerd.sock")
PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.1
CLONE_NEWNET = 0x40000000

# Puts a process into the node's cgroup of services before it becomes the command.
ENTER = (
    f'for group in /sys/fs/cgroup/{namespaces.SYSTEM} /sys/fs/cgroup/*/{namespaces.SYSTEM}; do [ ! -d "$group" ] || '
)
ENTER += 'echo $$ >"$group/cgroup.procs" || exit 1; done; exec "$@"'
CONTAINERD_CONFIG = Path(__file__).with_name("containerd.toml")
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": True,
            "ipam": {"type": "host-local", "subnet": "10.88.0.0/16"},
        }
    ],
}
KUBELET_CONFIG = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "staticPodPath": str(MANIFESTS),
    "fileCheckFrequency": "1s",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "failSwapOn": False,
    "oomScoreAdj": 0,
    "makeIPTablesUtilChains": False,
    "protectKernelDefaults": True,
    "enableControllerAttachDetach": False,
    "imageGCHighThresholdPercent": 100,
    "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "0%"},
    "featureGates": {"LocalStorageCapacityIsolation": False},
    "resolvConf": "",
}


@dataclass(frozen=True, slots=True)
class RunningContainer:
    """A container with a running task, as containerd lists it."""

    id: str
    namespace: str
    pod: str  # with "-live-node" at the end: the name that PodResources reports
    pod_uid: str  # as in the cgroup's path and in /var/log/pods
    name: str  # "" for the pod's sandbox (the pause container)
    pid: int  # the first process

    @property
    def is_sandbox(self) -> bool:
        return not self.name


class LiveNode:
    """A node of its own: `with LiveNode(folder) as node`. The kubelet is up and takes pods from then on."""

    def __init__(self, folder: Path) -> None:
        """`folder` takes the logs of kubelet and containerd, and all that they write; short, and on a real disk."""
        self.folder = folder
        self._ends = contextlib.ExitStack()
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self._labels: dict[str, Mapping[str, str]] = {}
        self.init = 0
        self._supervisor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LiveNode:
        """Start everything, with the images of pause and busybox, and wait until PodResources answers."""
        with contextlib.ExitStack() as ends:
            self._make_namespaces(ends)
            self._write_settings()
            self.start_containerd()
            for name, files in self._small_images().items():
                archive = self.folder / "image.tar"
                write_image(archive, name, files)
                self.import_image(archive)
                archive.unlink()
            self.start_kubelet()
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End every process of the node and remove its mounts and cgroups. `folder` keeps only the logs."""
        self._ends.close()

    def _make_namespaces(self, ends: contextlib.ExitStack) -> None:
        with (self.folder / "namespaces.log").open("wb") as log:
            self._supervisor = subprocess.Popen(
                (sys.executable, namespaces.__file__, self.folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
                start_new_session=True,  # Ctrl-C ends the test, and the end of the test ends this
            )
        ends.callback(self._end)
        assert self._supervisor.stdout is not None
        ready = self._supervisor.stdout.readline().decode().strip()
        assert ready == namespaces.READY, (self.folder / "namespaces.log").read_text()
        self.init = only_child(only_child(self._supervisor.pid))
        ends.enter_context(network := ThreadPoolExecutor(1, initializer=enter_network, initargs=(self.init,)))
        self._network = network

    def _end(self) -> None:
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        self._supervisor.stdin.close()
        self._supervisor.wait(namespaces.PATIENCE_SECONDS * 2)
        self._supervisor.stdout.close()
        for service in self._services.values():
            service.wait()

    # --- where things are ---

    def path(self, path: Path | str) -> Path:
        """Where this process finds a file of the node: also a socket, or a file on a mount that only the node has."""
        return Path(f"/proc/{self.init}/root{path}")

    def command(self, *command: str | Path) -> list[str | Path]:
        """What to run here to have `command` run on the node, in all its namespaces, outside every pod."""
        kinds = ("--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup")
        return ["nsenter", "--target", str(self.init), *kinds, "--", "sh", "-c", ENTER, "sh", *command]

    def run(self, *command: str | Path, seconds: float = 60.0) -> str:
        """Run a command on the node and give its standard output. A failure shows both outputs."""
        return run(*self.command(*command), seconds=seconds)

    def popen(self, *command: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command on the node that goes on in the background, outside every pod (a device plugin).

        `terminate` of what this gives does not reach the command: use `end`.
        """
        return subprocess.Popen(self.command(*command), **options)

    def end(self, process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to a command that `popen` started, wait for its end, and give its status."""
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(only_child(process.pid), number)
        return process.wait(PATIENCE_SECONDS)

    def in_network(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread of this process that is in the node's network: its sockets reach the pods.

        `node.in_network(fetch, "http://127.0.0.1:9401/metrics")` fetches gpumap's page.
        """
        return self._network.submit(function, *arguments).result()

    # --- kubelet and containerd ---

    def start_kubelet(self) -> None:
        """Start it and wait until PodResources answers."""
        words = {
            "config": KUBELET_DIRECTORY / "config.yaml",
            "container-runtime": "remote",
            "container-runtime-endpoint": f"unix://{CONTAINERD_SOCKET}",
            "hostname-override": NODE_NAME,
            "node-ip": namespaces.NODE_ADDRESS,
            "volume-plugin-dir": KUBELET_DIRECTORY / "volume-plugins",
            "v": "2",
        }
        self._start("kubelet", tool("kubelet"), *(f"--{name}={value}" for name, value in words.items()))
        self._wait_for("kubelet", self.list_pod_resources)

    def stop_kubelet(self) -> None:
        """End it with SIGTERM; containers go on. Its sockets' files stay, and refuse connections."""
        self.end(self._services.pop("kubelet"))

    def restart_kubelet(self) -> None:
        self.stop_kubelet()
        self.start_kubelet()

    @contextlib.contextmanager
    def kubelet_away(self) -> Iterator[None]:
        """Without a kubelet in the block; it is back, and answers, afterwards."""
        self.stop_kubelet()
        try:
            yield
        finally:
            self.start_kubelet()

    def list_pod_resources(self) -> bytes:
        """PodResources' List, as the kubelet sent it. Raises grpc.RpcError."""
        with grpc.insecure_channel(
            f"unix://{self.path(POD_RESOURCES_SOCKET)}", options=[("grpc.default_authority", "localhost")]
        ) as channel:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/v1.PodResourcesLister/List")
            return ask(b"", timeout=5)

    def start_containerd(self) -> None:
        """Start it and wait until it answers."""
        self._start("containerd", tool("containerd"), "--config", "/var/lib/containerd/config.toml")
        self._wait_for("containerd", lambda: self._ctr("version"))
        self._wait_for("containerd", self._ask_runtime)  # a kubelet that starts before this is ready ends

    def _ask_runtime(self) -> bytes:
        """The version of the runtime, as the kubelet asks for it. Raises grpc.RpcError until it is initialized."""
        with grpc.insecure_channel(
            f"unix://{self.path(CONTAINERD_SOCKET)}", options=[("grpc.default_authority", "localhost")]
        ) as channel:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                "/runtime.v1alpha2.RuntimeService/Version"
            )
            return ask(b"", timeout=5)

    def stop_containerd(self) -> None:
        """End it with SIGTERM; containers go on, because their shims stay."""
        self.end(self._services.pop("containerd"))

    def restart_containerd(self) -> None:
        """End containerd with SIGTERM, start it, and wait until it answers. Containers go on: their shims stay."""
        self.stop_containerd()
        self.start_containerd()

    def _start(self, name: str, *command: str | Path) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._services[name] = self.popen(*command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _wait_for(self, name: str, answers: Callable[[], object]) -> None:
        """Wait until a service answers; a failure shows the end of its log."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answers()
                return
            except (grpc.RpcError, AssertionError) as error:
                if self._services[name].poll() is not None or time.monotonic() > deadline:
                    log = (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]
                    raise AssertionError(f"no {name}:\n{log}") from error
                time.sleep(POLL_SECONDS)

    def _write_settings(self) -> None:
        networks = Path("/var/lib/cni/networks-here")
        tree = tool("containerd").resolve().parent / "tree"
        config = CONTAINERD_CONFIG.read_text().format(
            socket=CONTAINERD_SOCKET,
            pause=PAUSE_IMAGE,
            plugins=tree / "usr/lib/cni",
            networks=networks,
            runc=tree / "usr/sbin/runc",
        )
        self.path("/var/lib/containerd/config.toml").write_text(config)
        self.path(networks).mkdir()
        (self.path(networks) / "pods.conflist").write_text(json.dumps(NETWORK))
        self.path(MANIFESTS).mkdir()
        self.path(KUBELET_DIRECTORY / "config.yaml").write_text(yaml.safe_dump(KUBELET_CONFIG))

    # --- images ---

    def import_image(self, archive: Path) -> None:
        """Make an image known that an OCI or docker archive holds, under the name that it has there."""
        self.run(tool("ctr"), "--namespace", "k8s.io", "images", "import", archive.absolute(), seconds=PATIENCE_SECONDS)

    def _small_images(self) -> dict[str, dict[str, bytes | str]]:
        """Files of the images of pause and busybox: bytes of a program, or where a link leads."""
        busybox = tool("busybox")
        program = (
            next(busybox.resolve().parent.glob("tree/*/busybox"), None)
            or busybox.resolve().parent / "tree/usr/bin/busybox"
        )
        applets = {f"bin/{name}": "busybox" for name in run(busybox, "--list").split() if name != "busybox"}
        return {
            PAUSE_IMAGE: {"pause": tool("pause").resolve().read_bytes()},
            BUSYBOX_IMAGE: {"bin/busybox": program.read_bytes(), **applets},
        }

    # --- pods ---

    def apply(self, pod: Mapping[str, Any]) -> None:
        """Write a pod as a static pod's manifest, or write it again. The kubelet takes it within a second.

        The kubelet computes a static pod's UID from its content. It starts the same pod again only after it has
        forgotten the earlier one (up to 45 s). A changed annotation makes another UID.

        `metadata.name` and `metadata.namespace` (default: "default") name it. A static pod has no API server: set
        `imagePullPolicy: Never`, and use neither service accounts nor ConfigMaps nor Secrets nor claims.
        """
        metadata = pod["metadata"]
        file = self._manifest(metadata["name"], metadata.get("namespace", "default"))
        unfinished = self.path(KUBELET_DIRECTORY / f"new-{file.name}")  # the kubelet never reads half of it
        unfinished.write_text(yaml.safe_dump(dict(pod)))
        unfinished.rename(file)

    def delete(self, name: str, namespace: str = "default") -> None:
        """Remove a static pod's manifest. Its containers get SIGTERM, and SIGKILL after its grace period."""
        self._manifest(name, namespace).unlink()

    def _manifest(self, name: str, namespace: str) -> Path:
        return self.path(MANIFESTS / f"{namespace}_{name}.yaml")

    def wait_running(
        self, name: str, namespace: str = "default", seconds: float = PATIENCE_SECONDS
    ) -> list[RunningContainer]:
        """Wait until all containers that the manifest lists run, and give them (without the sandbox)."""
        manifest = yaml.safe_load(self._manifest(name, namespace).read_text())
        expected = {container["name"] for container in manifest["spec"]["containers"]}

        def found() -> list[RunningContainer] | None:
            running = [one for one in self._of_pod(name, namespace) if one.name in expected]
            return running if {one.name for one in running} == expected else None

        return self._eventually(found, seconds, f"containers {expected} of {namespace}/{name}")

    def wait_gone(self, name: str, namespace: str = "default", seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until no container or sandbox of the pod runs."""
        self._eventually(lambda: not self._of_pod(name, namespace) or None, seconds, f"end of {namespace}/{name}")

    def _of_pod(self, name: str, namespace: str) -> list[RunningContainer]:
        pod = f"{name}-{NODE_NAME}"
        return [one for one in self.containers() if (one.namespace, one.pod) == (namespace, pod)]

    def _eventually(self, found: Callable[[], T | None], seconds: float, what: str) -> T:
        deadline = time.monotonic() + seconds
        while (answer := found()) is None:
            log = self.folder / "kubelet.log"
            assert time.monotonic() < deadline, f"no {what} in {seconds} s:\n{log.read_text(errors='replace')[-4000:]}"
            time.sleep(POLL_SECONDS)
        return answer

    # --- the truth about what runs ---

    def containers(self) -> list[RunningContainer]:
        """What runs at this moment, sandboxes too, sorted by name: containerd's answer (`ctr`), not the kubelet's."""
        running = []
        for line in self._ctr("tasks", "list").splitlines()[1:]:
            container, pid, status = line.split()
            if status != "STOPPED" and (labels := self._labels_of(container)) is not None:
                namespace, pod, uid = (labels[f"io.kubernetes.pod.{key}"] for key in ("namespace", "name", "uid"))
                name = labels.get("io.kubernetes.container.name", "")
                running.append(RunningContainer(container, namespace, pod, uid, name, int(pid)))
        return sorted(running, key=lambda one: (one.namespace, one.pod, one.name, one.id))

    def _labels_of(self, container: str) -> Mapping[str, str] | None:
        if container not in self._labels:
            try:
                self._labels[container] = json.loads(self._ctr("containers", "info", container))["Labels"]
            except AssertionError as error:
                if "not found" not in str(error):  # it ended between the two questions
                    raise
                return None
        return self._labels[container]

    def _ctr(self, *command: str) -> str:
        """Ask containerd, from outside: its socket is all that this takes."""
        return run(tool("ctr"), "--address", self.path(CONTAINERD_SOCKET), "--namespace", "k8s.io", *command)

    def processes(self, container: RunningContainer) -> list[int]:
        """PIDs of all processes of a container, as the runtime lists them."""
        lines = self._ctr("tasks", "ps", container.id).splitlines()[1:]
        return [int(line.split()[0]) for line in lines]

    def signal(self, pid: int, name: str = "KILL") -> None:
        """Send a signal to a process of the node."""
        self.run("sh", "-c", f"kill -{name} {pid}")

    def exec(self, container: RunningContainer, *command: str) -> str:
        """Run a command inside a container and give its standard output."""
        words = ("tasks", "exec", "--exec-id", f"exec-{os.urandom(4).hex()}", container.id, *command)
        return self.run(tool("ctr"), "--namespace", "k8s.io", *words)


def run(*command: str | Path, seconds: float = 60.0) -> str:
    """Run a command and give its standard output. A failure shows both outputs."""
    done = subprocess.run(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def only_child(pid: int) -> int:
    """The child that a wrapper (`unshare`, `nsenter`) runs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < deadline, f"{pid} has no child"
        time.sleep(0.01)
    return int(children[0])


def enter_network(pid: int) -> None:
    """Bring this thread into the network namespace of a process."""
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def write_image(archive: Path, name: str, files: Mapping[str, bytes | str]) -> None:
    """Write a docker archive of one layer. A file is a program's bytes, or where its link leads."""
    layer = tar_of({f"./{path}": content for path, content in files.items()})
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Entrypoint": [f"/{next(iter(files))}"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts: dict[str, bytes | str] = {"config.json": json.dumps(config).encode(), "layer.tar": layer}
    archive.write_bytes(tar_of({"manifest.json": json.dumps(manifest).encode(), **parts}))


def tar_of(files: Mapping[str, bytes | str]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.mode = 0o755
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return output.getvalue()


def busybox_pod(name: str, *containers: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    """A pod of busybox containers. Each is a dictionary with `name`, and what else it needs; it sleeps by default."""
    default = {"image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": sleep()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [default | dict(container) for container in containers or ({"name": "main"},)],
        }
        | spec,
    }


def sleep() -> Sequence[str]:
    """A command that lasts until SIGTERM."""
    return ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"]
