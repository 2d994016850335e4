"""What a node sends to the agent: the kubelet's answers and files, DRA's and schedulers' files, /proc, logs, NVML.

Each function declares in its docstring what its source may send, and in its target what the parser may raise.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.agent._proto.pods import v1alpha1_pb2
from gpumap.agent.dialects import DIALECTS
from gpumap.agent.exposition import Exposition
from gpumap.agent.flags import ALL_DIALECTS
from gpumap.agent.join import Memory
from gpumap.agent.join.step import step
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.agent.nvml_worker import wire
from gpumap.agent.published import published
from gpumap.agent.sources import checkpoint, dra, fractioning, inotify, pods_api, processes
from gpumap.agent.sources.checkpoint import CheckpointSource
from gpumap.agent.sources.dra import DraSource
from gpumap.agent.sources.fractioning import FractioningSource
from gpumap.agent.sources.identity import PodIdentitySource, PodLogsSource
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.agent.sources.pci import PciSource
from gpumap.agent.sources.podresources import KnownPods
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.lab import node as captured_node
from gpumap.lab.capture import answers, contents
from gpumap.lab.capture.checkpoints import SHARING_FOLDER
from gpumap.lab.node_files import NodeFiles
from gpumap.model import cgroups
from gpumap.model.device_ids import parse, parse_dra, parse_node, parse_visible
from gpumap.model.formatting import parse_quantity
from gpumap.model.node import decode, encode
from gpumap.model.observations import (
    Complaint,
    DeviceId,
    Failed,
    KubeletAnswer,
    Moment,
    NvmlReading,
    Observations,
    Observed,
    ReportedPod,
    SourceAnswer,
    SourceError,
)
from gpumap.model.plugins import named_devices, recognise, recognise_dra
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.workloads import slurm_job, workload
from tests import laws
from tests.exposed import Page
from tests.fuzz import corpus
from tests.fuzz.changes import (
    changed_files,
    changed_json,
    changed_json_lines,
    changed_protobuf,
    edited,
    pack,
    unpack,
)
from tests.fuzz.folders import folder, lay_out
from tests.fuzz.target import target
from tests.nodes import RULES

T = TypeVar("T")

FAMILIES = (*native(tuple(GROUPS), process_metrics=True), *self_families("1", "3.11"))
DIALECT_FAMILIES = tuple(family for name in ALL_DIALECTS for family in DIALECTS[name].families)


# --- the kubelet ------------------------------------------------------------------------------------------------------


LIST_NOT_UTF8 = b"\n\x08\n\x03a\xffb\x12\x01c"


@target(lambda: [*corpus.lists(), LIST_NOT_UTF8], changed_protobuf, DecodeError)
def read_podresources_list(data: bytes) -> object:
    """PodResources List, v1 and v1alpha1, also of a scheduler's agent."""
    known = KnownPods()
    pods, complaints = known.read_list(data)
    assert known.read_list(data)[0] is pods, "the same bytes must give the very same object"
    for complaint in complaints:
        assert complaint.detail.isprintable(), repr(complaint.detail)
    return pods, complaints


@target(corpus.offers, changed_protobuf, DecodeError)
def read_podresources_allocatable(data: bytes) -> object:
    """GetAllocatableResources."""
    return KnownPods().read_allocatable(data)


@target(corpus.pods_lists, changed_protobuf, DecodeError)
def read_pods_api(data: bytes) -> object:
    """The Pods API's ListPods."""
    return tuple(map(pods_api.decode_pod, v1alpha1_pb2.ListPodsResponse.FromString(data).pods))


NUMBER_AS_ANSWER = b'{"Data":{"PodDeviceEntries":[{"PodUID":"","ContainerName":"","ResourceName":"","AllocResp":5}]}}'


@target(lambda: [*corpus.files(contents.CHECKPOINT), NUMBER_AS_ANSWER], changed_json, ValueError)
def read_device_checkpoint(data: bytes) -> object:
    """The kubelet's device checkpoint."""
    return checkpoint.parse(data)


def _plugin_answer_examples() -> Iterator[bytes]:
    for text in corpus.files(contents.CHECKPOINT):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for row in json.loads(text)["Data"]["PodDeviceEntries"] or ():
                if answer := row.get("AllocResp"):
                    yield base64.b64decode(answer)


@target(_plugin_answer_examples, changed_protobuf, ValueError)
def read_plugin_answer(data: bytes) -> object:
    """A device plugin's ContainerAllocateResponse (NVIDIA, MPS, HAMi, volcano, gpushare)."""
    answer = checkpoint.parse_plugin_answer(data)
    return answer, named_devices(answer)


@target(lambda: ["\n".join(corpus.device_ids()).encode()], edited)
def read_device_ids(data: bytes) -> object:
    """Lines of a resource, a tab and a device id, of any plugin or DRA driver. Raises nothing."""
    answers: list[object] = []
    for line in data.decode("utf-8", "backslashreplace").split("\n"):
        resource, _, id_ = line.partition("\t")
        answers += [recognise(resource, DeviceId(id_)), recognise_dra(resource, id_), parse(DeviceId(id_))]
        answers += [parse_dra(id_), parse_visible(id_), parse_node(id_)]
        with contextlib.suppress(ValueError):
            answers.append(parse_quantity(id_))
    return answers


# --- files of DRA and schedulers --------------------------------------------------------------------------------------


@target(lambda: corpus.files(contents.DRA_STATE), changed_json, ValueError)
def read_dra_state(data: bytes) -> object:
    """The kubelet's dra_manager_state."""
    return dra.parse_state(data)


@target(lambda: corpus.files(contents.DRA_CHECKPOINT), changed_json, ValueError)
def read_dra_checkpoint(data: bytes) -> object:
    """The checkpoint of NVIDIA's DRA driver."""
    return dra.parse_prepared(data)


@target(
    lambda: [text for frame in corpus.frames() for path, text in frame.items() if path.startswith("gpu_fractioning/")],
    changed_json,
    ValueError,
)
def read_gpu_fractioning(data: bytes) -> object:
    """A mapping file of KAI-Scheduler's fractiond."""
    return fractioning.parse_record("0" * 64, data)


# --- /proc ------------------------------------------------------------------------------------------------------------


@target(lambda: [b"0::/\n\n" + text for text in corpus.files("cgroup")], edited)
def read_cgroup(data: bytes) -> object:
    """/proc/PID/cgroup, of gpumap (before the first empty line) and of another process. Raises nothing."""
    own_text, _, text = data.decode(errors="replace").partition("\n\n")
    own = cgroups.own(own_text)
    paths = cgroups.paths(text)
    return (
        cgroups.parse(text, own),
        cgroups.parse(text, own, has_kubelet=False),
        cgroups.is_outside(text, own),
        cgroups.is_bare_host(own),
        workload(paths),
        slurm_job(paths),
    )


@target(lambda: corpus.files("stat"), edited, ValueError)
def read_proc_stat(data: bytes) -> object:
    """/proc/PID/stat; the name in it is any text of the process."""
    return processes.parse_stat(data.decode(errors="replace"))


_PROC_FILES = re.compile(r"proc/[^/]+/(?:cgroup|stat|status|comm|cmdline)|own/cgroup|own/root/etc/passwd")


def _proc_examples() -> Iterator[bytes]:
    passwd = b"root:x:0:0:root:/root:/bin/sh\nana:x:1000:1000::/home/ana:/bin/sh\n"
    for frame in corpus.frames():
        files = {path: text for path, text in frame.items() if path.startswith(("proc/", "own/"))}
        stats = [path for path in files if path.endswith("/stat")]
        files |= {f"{path}us": b"Name:\tx\nUid:\t1000\t1000\n" for path in stats}
        files[f"proc/{os.getpid()}/cgroup"] = files.get("own/cgroup", b"0::/\n")
        parent = stats[0].split("/")[1] if stats else "1"
        child = f"9 (python3) S {parent}{' 1' * 17} 999999999\n".encode()  # docker in a pod, if its parent is in one
        files |= {"proc/9/cgroup": b"0::/docker/9\n", "proc/9/stat": child}
        yield pack(files | {"own/root/etc/passwd": passwd})


@target(_proc_examples, changed_files(lambda path: edited), SourceError)
def read_proc_tree(data: bytes) -> object:
    """A tree of /proc: cgroup, stat, status, comm and cmdline of several processes, gpumap's own cgroup, and passwd."""
    with folder() as place:
        lay_out({path: text for path, text in unpack(data).items() if _PROC_FILES.fullmatch(path)}, place)
        source = ProcfsSource(place / "proc", place / "own")
        try:
            (place / "proc").mkdir(exist_ok=True)
            pids = [int(name) for name in os.listdir(place / "proc") if re.fullmatch("[0-9]{1,9}", name)]
            answer = source.read([*pids, 424242], None)
            for entry in answer.value.entries:
                assert not entry.workload or entry.workload.name, "a workload without a name"
            return answer.value.entries, answer.value.unreadable, answer.value.pid_visibility
        finally:
            source.close()


# --- names of logs, and inotify ---------------------------------------------------------------------------------------


def _log_examples() -> Iterator[bytes]:
    for text in corpus.files(contents.LOG_TREE):
        entries = contents.log_entries({contents.LOG_TREE: text}) or ()
        lines = (f"{entry.path.removeprefix('var/log/')} -> {entry.target or ''}" for entry in entries)
        yield "\n".join(line.removesuffix(" -> ") for line in lines).encode()


@target(_log_examples, edited, SourceError)
def read_pod_logs(data: bytes) -> object:
    """Names below /var/log: lines of a directory or of a link with its target."""
    with folder() as place:
        for line in data.split(b"\n"):
            name, arrow, target = line.partition(b" -> ")
            path = os.fsencode(place) + b"/" + name
            if b".." in name or b"\0" in line or len(name) > 600:
                continue
            with contextlib.suppress(OSError):
                if arrow:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    os.symlink(target, path)
                else:
                    os.makedirs(path, exist_ok=True)
        return PodLogsSource(place).read(0.0).value


@target(lambda: [b"0000:3b:00.0\n0x10de\n0x030200\n0x2330\n(null)"], edited, SourceError)
def read_pci(data: bytes) -> object:
    """Files of a PCI function below /sys: a line with its name, then a line for each file."""
    files = ("vendor", "class", "device", "driver_override")
    name, *lines = data.split(b"\n")
    if b"/" in name or b"\0" in name or not 0 < len(name) <= 200 or name in (b".", b".."):
        return None
    with folder() as place:
        function = os.fsencode(place / "bus/pci/devices") + b"/" + name
        os.makedirs(function)
        for file, line in zip(files, lines, strict=False):
            Path(os.fsdecode(function), file).write_bytes(line)
        source = PciSource(place)
        try:
            return source._read_functions(())
        finally:
            source.close()


INOTIFY_NAMES = b"checkpoint\0\0", b"pod_ns_container-0123.log\0", b""


@target(
    lambda: [inotify._HEAD.pack(1, inotify.CREATE, 0, len(name)) + name for name in INOTIFY_NAMES], edited, ValueError
)
def read_inotify(data: bytes) -> object:
    """Events as the kernel writes them, with names of any files."""
    try:
        return list(inotify.events(data))
    except struct.error as error:
        raise ValueError(str(error)) from error


# --- NVML -------------------------------------------------------------------------------------------------------------


def _wire_examples() -> Iterator[bytes]:
    for text in corpus.files(contents.NVML):
        reading = contents.reading({contents.NVML: text})
        if isinstance(reading, NvmlReading):
            yield from (wire.encode(wire.GpuMessage(1, gpu)) for gpu in reading.gpus)
            yield wire.encode(wire.DriverMessage(1, "550", "12.4", "12", len(reading.gpus)))
            yield wire.encode(wire.ListeningMessage((wire.ListeningPeriod(Uuid("GPU-1"), 1.0, 2.0),)))
            yield wire.encode(wire.XidMessage(Uuid("GPU-1"), 79, None, None, 3.0))
    yield wire.encode(wire.ErrorMessage(1, 9, "driver_not_loaded", "no driver"))


@target(_wire_examples, changed_json, ValueError)
def read_nvml_wire(data: bytes) -> object:
    """A line of the worker's."""
    message = wire.decode(data)
    assert wire.decode(wire.encode(message)) is not None
    return message


WIRE_REQUEST = wire.Request(1, 5.0, 5.0, (1,), (2,), ("health",), True, 15.0)


@target(lambda: [wire.encode(WIRE_REQUEST)], changed_json, ValueError)
def read_nvml_request(data: bytes) -> object:
    """A request to the worker."""
    return wire.decode_request(data)


_SPEAKING = "import os, sys; os.write(1, open(sys.argv[1], 'rb').read()); os.write(2, open(sys.argv[2], 'rb').read())"


def _worker_examples() -> Iterator[bytes]:
    for text in corpus.files(contents.NVML):
        reading = contents.reading({contents.NVML: text})
        if isinstance(reading, NvmlReading) and len(text) < 6000:
            lines = [wire.encode(wire.DriverMessage(1, "550", "12.4", "12", len(reading.gpus)))]
            lines += [wire.encode(wire.GpuMessage(1, gpu)) for gpu in reading.gpus]
            yield pack({"out": b"".join(lines), "error": b"Traceback\nSome library: error \xff\n"})


@target(
    _worker_examples,
    changed_files(lambda path: changed_json_lines if path == "out" else edited),
    SourceError,
    slow=True,
)
def read_nvml_worker_output(data: bytes) -> object:
    """A worker that writes any bytes to stdout and stderr, and ends."""
    files = unpack(data)

    async def read(place: Path) -> object:
        out, error = place / "out", place / "error"
        out.write_bytes(files.get("out", b"")[: 1 << 16])
        error.write_bytes(files.get("error", b"")[: 1 << 15])
        source = NvmlSource([sys.executable, "-I", "-S", "-c", _SPEAKING, str(out), str(error)])
        try:
            gpus = (await source.read(5.0, 10.0)).value.gpus
            assert [gpu.index for gpu in gpus] == list(range(len(gpus))), "a GPU is missing, or is there twice"
            return gpus
        finally:
            await source.close()

    with folder() as place:
        return asyncio.run(read(place))


# --- a whole node -----------------------------------------------------------------------------------------------------


@target(
    lambda: map(pack, [*corpus.nodes(), _odd_node()]),
    changed_files(corpus.choose_change),
    ValueError,
    lines_per_byte=400,
)
def read_node(data: bytes) -> object:
    """The files of one capture's frame, as the sources of a running agent read them: two collections, then all pages.

    A source may fail with a SourceError. Nothing after the sources fails, and the laws hold.
    """
    files = unpack(data)
    with folder() as place:
        try:
            tree = captured_node.files_of({contents.NVML: b"", contents.OWN_CGROUP: b"0::/\n", **files})
            NodeFiles(place).show(tree)
        except (ValueError, OSError):
            raise ValueError("not the files of a node") from None
        return _pages(list(_collections(files, place))[-1])


def _collections(files: dict[str, bytes], place: Path) -> Iterator[Snapshot]:
    kubelet = KnownPods()
    procfs = ProcfsSource(place / captured_node.PROC, place / captured_node.OWN)
    identity = PodIdentitySource(
        CheckpointSource((place / captured_node.CHECKPOINT,)),
        PodLogsSource(place / captured_node.LOGS),
        DraSource(place / captured_node.DRA_STATE, place / captured_node.DRA_CHECKPOINT),
        lambda: 0.0,
        lambda: _pods_of(files),
        FractioningSource(place / SHARING_FOLDER).read,
    )
    memory = Memory()
    has_list = False
    try:
        for number in range(2):
            now = Moment(1000.0 + 5 * number, 1.7e9 + 5 * number)
            nvml = _observed(partial(_reading, files), now)
            pids = sorted(_pids(nvml.value)) if isinstance(nvml, Observed) else []
            listed = _observed(partial(_kubelet_answer, files, kubelet), now)
            seen = Observations(
                nvml,
                _observed(partial(procfs.read, pids, None), now),
                _observed(identity.read, now),
                listed,
                now,
            )
            memory, snapshot = step(memory, seen, RULES)
            answer = listed.value if isinstance(listed, Observed) else None
            has_list |= answer is not None
            _judge(snapshot, answer, has_list)
            yield snapshot
    finally:
        procfs.close()


def pages_of(reading: NvmlReading) -> object:
    """Check the pages of a machine without a kubelet and without /proc. Its driver answered this twice."""
    memory = Memory()
    for number in range(2):
        now = Moment(1000.0 + 5 * number, 1.7e9 + 5 * number)
        failed = Failed(now, 0.0, (Complaint("unreadable", "no /proc"),))
        memory, snapshot = step(memory, Observations(Observed(reading, now, 0.0), failed, None, None, now), RULES)
        _judge(snapshot, None, has_list=False)
    return _pages(snapshot)


def _judge(snapshot: Snapshot, answer: KubeletAnswer | None, has_list: bool) -> None:
    """The laws that need no truth. `answer` is the kubelet's, read in this collection."""
    page = Page(Exposition(FAMILIES).render(snapshot).decode())
    faults = [*laws.inconsistent(page), *laws.unproven(page, has_list=has_list, answered=answer is not None)]
    if answer is not None:
        faults += laws.lost(page, laws.ids_of(answer.pods, lambda resource, _: RULES.is_gpu_resource(resource)))
    assert not faults, "\n".join(faults)


def _pages(snapshot: Snapshot) -> tuple[bytes, ...]:
    text = Exposition(FAMILIES).render(snapshot)
    openmetrics = Exposition(FAMILIES, openmetrics=True).render(snapshot)
    Page(openmetrics.decode(), openmetrics=True)
    dialects = Exposition(DIALECT_FAMILIES).render(snapshot)
    Page(dialects.decode())
    document = encode(published(snapshot))
    decode(document)
    return text, openmetrics, dialects


def _observed(read: Callable[[], SourceAnswer[T]], now: Moment) -> Observed[T] | Failed:
    """As the agent does it, but an error that no source declares is one here."""
    try:
        answer = read()
    except SourceError as error:
        return Failed(now, 0.0, error.complaints)
    return Observed(answer.value, now, 0.0, answer.complaints)


def _kubelet_answer(files: dict[str, bytes], kubelet: KnownPods) -> SourceAnswer[KubeletAnswer]:
    try:
        raw = answers.answer(files, contents.LIST)
        if raw is None:
            raise SourceError("socket_missing", "no List")
        pods, complaints = kubelet.read_list(raw)
        offer = answers.answer(files, contents.ALLOCATABLE)
        allocatable = kubelet.read_allocatable(offer) if offer is not None else None
    except (DecodeError, ValueError) as error:
        raise SourceError("decode", str(error)) from error
    return SourceAnswer(KubeletAnswer(pods, allocatable, "first", False, True), complaints)


def _pods_of(files: dict[str, bytes]) -> SourceAnswer[tuple[ReportedPod, ...] | None]:
    if contents.PODS not in files:
        return SourceAnswer(None)
    try:
        pods = tuple(sorted({pods_api.decode_pod(pod) for pod in answers.pods(files[contents.PODS])}, key=repr))
    except (DecodeError, ValueError) as error:
        return SourceAnswer(None, (Complaint("pods_api_decode", str(error)),))
    return SourceAnswer(tuple(pod for pod in pods if pod.pod_uid))


def _reading(files: dict[str, bytes]) -> SourceAnswer[NvmlReading]:
    """NVML's reading, as the worker sends it. The worker reads numbers without a sign."""
    if re.search(rb"[:\[,]\s*-", files.get(contents.NVML, b"")):
        raise SourceError("protocol", "a negative number")
    try:
        reading = contents.reading(files)
    except ValueError as error:
        raise SourceError("protocol", str(error)) from error
    if not isinstance(reading, NvmlReading):
        raise SourceError(reading.reason, reading.detail)
    return SourceAnswer(reading)


def _pids(reading: NvmlReading) -> set[int]:
    lists = [gpu.processes for gpu in reading.gpus]
    lists += [instance.processes for gpu in reading.gpus for instance in gpu.instances]
    return {process.pid for processes in lists for process in processes or ()}


def _odd_node() -> dict[str, bytes]:
    """Return a node with names that a line of a page must escape."""
    odd = 'a"b\\c\nd\u2028'
    devices = [{"resourceName": "nvidia.com/gpu", "deviceIds": ["GPU-00000000-0000-0000-0000-000000000000"]}]
    pod = {"name": odd, "namespace": odd, "containers": [{"name": odd, "devices": devices}]}
    listed = json_format.ParseDict({"podResources": [pod]}, v1_pb2.ListPodResourcesResponse())
    return {**next(corpus.nodes()), f"{contents.LIST}.pb": listed.SerializeToString()}
