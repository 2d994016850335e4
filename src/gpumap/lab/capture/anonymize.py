"""Renames a capture: file by file, with one set of pseudonyms for all, and in an order that reveals nothing.

It leaves out what it cannot read. gpumap makes the same map of it, except for the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from msgspec import structs

from gpumap import __version__
from gpumap.lab.capture import answers, checkpoints, contents
from gpumap.lab.capture.checkpoints import container_id, renamed_path, renamed_sharing
from gpumap.lab.capture.format import Capture, Frame
from gpumap.lab.capture.pseudonyms import Pseudonyms
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import GpuReading, Uuid

IsGpuResource = Callable[[str], bool]

_LOG_PATH = re.compile(r"(/?var/log/pods/)([^/_]*)_([^/_]*)_([^/_]*)(?:/([^/]+)(?:/([0-9]+\.log))?)?")
_NUMBER = re.compile(r"[0-9]{1,9}")
_STAT = re.compile(r"([0-9]{1,10} )\((.*)\)( [A-Za-z](?: -?[0-9]+)*\s*)", re.DOTALL)
_ID_LINE = re.compile(r"(Uid:\s+|slurmstepd: \[)([0-9]{1,10})")
_CALL = re.compile(r"nvml[A-Za-z0-9]{1,80}(?:_v[0-9])?")


def anonymize(capture: Capture, names: Pseudonyms) -> Capture:
    """Rename everything that may reveal the owner of the node. Models, versions, resources, PIDs and bus ids stay."""
    pattern = re.compile(capture.about.resource)
    renamed: dict[tuple[str, bytes], bytes | None] = {}  # unchanged parts of later frames are renamed once

    def is_gpu_resource(name: str) -> bool:
        return pattern.fullmatch(name) is not None

    def frame(frame_: Frame) -> Frame:
        out: dict[str, bytes] = {}
        for name, content in frame_.files.items():
            if (name, content) not in renamed:
                renamed[name, content] = _renamed(name, content, names, is_gpu_resource)
            new_content = renamed[name, content]
            if new_content is not None:
                out[name.replace(".json", ".pb") if name.startswith("kubelet/") else renamed_path(name, names)] = (
                    new_content
                )
        return replace(frame_, files=_add_undecoded(frame_.files, out))

    origin = f"recorded by gpumap {__version__}, anonymized"
    about = structs.replace(capture.about, node=names.node(capture.about.node), origin=origin, description="")
    return Capture(about, tuple(frame(frame_) for frame_ in capture.frames))


def _renamed(name: str, content: bytes, names: Pseudonyms, is_gpu_resource: IsGpuResource) -> bytes | None:
    """Return one file with new names; `None` if that is not possible."""
    if name == contents.PODS:
        return None  # a recording has none
    try:
        stem = name.rpartition(".")[0]
        if stem == contents.LIST:
            return answers.renamed_list(answers.answer({name: content}, stem) or b"", names, is_gpu_resource)
        if stem == contents.ALLOCATABLE:
            return answers.renamed_allocatable(answers.answer({name: content}, stem) or b"", names, is_gpu_resource)
        if id_ := container_id(name):
            return renamed_sharing(id_, content, names)
        if name == contents.CHECKPOINT:
            return checkpoints.cut_checkpoint(
                content, is_gpu_resource, uid=names.uid, container=names.container, id_=names.device
            )
        if name == contents.DRA_STATE:
            return checkpoints.renamed_dra_state(content, names)
        if name == contents.DRA_CHECKPOINT:
            return checkpoints.renamed_dra_checkpoint(content, names)
    except ValueError:
        return None
    if name == contents.LOG_TREE:
        return contents.log_text(_log_entries(content, names))
    if name == contents.NVML:
        return contents.reading_text(_reading(contents.reading({name: content}), names))
    if name == contents.PCI:
        return contents.pci_text(contents.pci_functions({name: content}) or ())
    if name == contents.DOWN:
        whys = contents.down({name: content})
        return contents.down_text({source: _reason_alone(why) for source, why in whys.items()})
    if name.endswith("/cgroup"):
        return _cgroup(content, names)
    text = content.decode(errors="replace")
    if name.endswith("/stat"):  # a line of another form could not have been read
        match = _STAT.fullmatch(text)
        return f"{match[1]}({names.comm(match[2])}){match[3]}".encode() if match else b""
    if name.endswith(("/status", "/cmdline")):  # a uid, or a job id: replaced as in cgroup paths
        match = _ID_LINE.match(text)
        return f"{match[1]}{names.cgroup(match[2])}\n".encode() if match else b""
    if name == contents.SOCKET:
        return b"%d\n" % contents.starts({name: content})
    return b""  # own/pid_in_tree


def _reason_alone(why: contents.Down) -> contents.Down:
    """A reason is one of gpumap's words. The source's own message may contain any name."""
    return contents.Down(_reason(why.reason), "")


def _reason(word: str) -> str:
    return word if word in contents.REASONS else "unknown"


def _add_undecoded(files: Mapping[str, bytes], out: dict[str, bytes]) -> dict[str, bytes]:
    """An answer or checkpoint that could not be renamed is removed; down.json reports it as not decodable."""
    whys = contents.down(out)
    for source, name, reason in (
        ("kubelet", contents.LIST, "decode"),
        ("checkpoint", contents.CHECKPOINT, "checkpoint_corrupt"),
    ):
        if any(path.startswith(name) for path in files) and not any(path.startswith(name) for path in out):
            whys[source] = contents.Down(reason)
    return {**out, contents.DOWN: contents.down_text(whys)} if whys else out


def _log_entries(content: bytes, names: Pseudonyms) -> list[contents.LogEntry]:
    """Return the directories of pods, their content, and links to them; other names are left out."""
    entries = []
    for entry in contents.log_entries({contents.LOG_TREE: content}) or ():
        path = _log_path(entry.path, names) if entry.kind != "l" else _link_path(entry, names)
        if path is not None:
            entries.append(entry._replace(path=path, target=(entry.target and _log_path(entry.target, names)) or ""))
    return sorted(entry for entry in entries if entry.kind != "l" or entry.target)


def _log_path(path: str, names: Pseudonyms) -> str | None:
    """`…/pods/<namespace>_<pod>_<uid>/<container>/0.log`, or the beginning of it."""
    if path in ("var/log/pods", "var/log/containers"):
        return path
    match = _LOG_PATH.fullmatch(path)
    if match is None:
        return None
    root, namespace, pod, uid, container, file = match.groups()
    renamed = f"{root}{names.namespace(namespace)}_{names.pod(pod)}_{names.uid(uid)}"
    return "/".join([renamed, *([names.container(container)] if container else []), *([file] if file else [])])


def _link_path(entry: contents.LogEntry, names: Pseudonyms) -> str | None:
    """`<pod>_<namespace>_<container>-<id>.log`, cut if it is too long: its target has the names."""
    folder, _, name = entry.path.rpartition("/")
    tree, container = entry.target.split("/")[-3:-1]
    parts = tree.split("_")
    if len(parts) != 3:
        return None
    full = f"{parts[1]}_{parts[0]}_{container}-"
    id_ = name.removesuffix(".log").removeprefix(full)
    if not name.startswith(full) or re.fullmatch(r"[0-9a-f]{1,64}", id_) is None:
        return None
    renamed = f"{names.pod(parts[1])}_{names.namespace(parts[0])}_{names.container(container)}"
    return f"{folder}/{renamed}-{names.container_id(id_)}.log"


def _reading(reading: NvmlReading | contents.Down, names: Pseudonyms) -> NvmlReading | contents.Down:
    if isinstance(reading, contents.Down):
        return _reason_alone(reading)
    return replace(
        reading,
        gpus=tuple(_gpu(gpu, names) for gpu in reading.gpus),
        xids=tuple(xid._replace(uuid=Uuid(names.device(xid.uuid))) for xid in reading.xids),
        listening=tuple(period._replace(uuid=Uuid(names.device(period.uuid))) for period in reading.listening),
    )


def _gpu(gpu: GpuReading, names: Pseudonyms) -> GpuReading:
    instances = tuple(structs.replace(instance, uuid=Uuid(names.device(instance.uuid))) for instance in gpu.instances)
    return structs.replace(
        gpu,
        uuid=gpu.uuid and Uuid(names.device(gpu.uuid)),
        fault=gpu.fault and _reason(gpu.fault),
        instances=instances,
        refusals={call if _CALL.fullmatch(call) else "": code for call, code in gpu.refusals.items()},
    )


def _cgroup(content: bytes, names: Pseudonyms) -> bytes:
    """Lines of the form `N:controllers:PATH`; other lines are left out."""
    lines = (line.split(":", 2) for line in content.decode(errors="replace").split("\n"))
    return "".join(
        f"{line[0] if _NUMBER.fullmatch(line[0]) else 0}:{names.controllers(line[1])}:{names.cgroup(line[2])}\n"
        for line in lines
        if len(line) == 3
    ).encode()
