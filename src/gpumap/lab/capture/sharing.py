"""The files of containers that share GPUs, in a capture: what gpumap reads of them, and with new names. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from gpumap.agent.sources.fractioning import Record, parse_record
from gpumap.lab.capture.pseudonyms import Pseudonyms
from gpumap.model.grouping import grouped
from gpumap.model.names import ContainerName, PodUid
from gpumap.model.observations import ContainerLink, ScheduledShare
from gpumap.model.plugins import MIB
from gpumap.model.readings import Uuid

FOLDER = "gpu_fractioning"
PATH = re.compile(rf"{FOLDER}/([0-9a-f]{{64}})\.json")


def sharing_files(links: Iterable[ContainerLink], shares: Iterable[ScheduledShare]) -> dict[str, bytes]:
    """Return a file for each container, in version 1 of their format."""
    of_container = grouped((share.container_id, share) for share in shares)
    return {
        f"{FOLDER}/{link.container_id}.json": _as_line(Record(link, tuple(of_container.get(link.container_id, ()))))
        for link in links
    }


def container_id(path: str) -> str | None:
    """Return the container of a file; `None` if it is another kind of file."""
    found = PATH.fullmatch(path)
    return found[1] if found else None


def renamed_path(path: str, names: Pseudonyms) -> str:
    found = container_id(path)
    return path if found is None else f"{FOLDER}/{names.container_id(found)}.json"


def renamed_sharing(id_: str, text: bytes, names: Pseudonyms) -> bytes:
    """Return a file with new names. Raises ValueError if it cannot be read."""
    old, shares = parse_record(id_, text)
    name = ContainerName(names.namespace(old.name.namespace), names.pod(old.name.pod), "")
    link = ContainerLink(names.container_id(id_), PodUid(names.uid(old.pod_uid)), name)
    return _as_line(
        Record(
            link,
            tuple(
                ScheduledShare(
                    link.pod_uid,
                    uuid=None if one.uuid is None else Uuid(names.device(one.uuid)),
                    minor=one.minor,
                    memory_bytes=one.memory_bytes,
                )
                for one in shares
            ),
        )
    )


def _as_line(record: Record) -> bytes:
    gpus = [
        {"index": number, "uuid": one.uuid or ""} | ({} if one.minor is None else {"minorNumber": one.minor})
        for number, one in enumerate(record.shares)
    ]
    amounts = {one.memory_bytes // MIB for one in record.shares if one.memory_bytes is not None}
    name = record.link.name
    file = {
        "schemaVersion": 1,
        "pod": name.pod,
        "namespace": name.namespace,
        "podUID": record.link.pod_uid,
        "gpuDevices": gpus,
        "requestedMemoryMiB": max(amounts, default=0),
    }
    return json.dumps(file, indent=1, ensure_ascii=False).encode() + b"\n"
