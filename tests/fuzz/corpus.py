"""Examples to begin with: the files of every capture in tests/captures, as the sources of a node wrote them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.agent._proto.pods import v1alpha1_pb2
from gpumap.lab.capture import answers, contents
from gpumap.lab.capture import format as on_disk
from tests.fuzz.changes import Change, changed_json, changed_protobuf, edited
from tests.golden import captures

SMALL_BYTES = 60_000
"""A larger capture is no example: mutations of it are slow, and reach nothing more."""


@functools.cache
def frames() -> tuple[dict[str, bytes], ...]:
    """Return the files of the frames of all small captures, each different one once."""
    every = (dict(frame.files) for capture in map(on_disk.load, captures()) for frame in capture.frames)
    small = [files for files in every if sum(map(len, files.values())) < SMALL_BYTES]
    return tuple(files for index, files in enumerate(small) if files not in small[:index])


def files(name: str) -> list[bytes]:
    """Return the different contents of a file in the captures; `name` is its path, or the end of one."""
    every = (files[path] for files in frames() for path in sorted(files) if f"/{path}".endswith(f"/{name}"))
    return list(dict.fromkeys(every))


def lists() -> list[bytes]:
    """Return the answers of PodResources List."""
    return _answers(contents.LIST)


def offers() -> list[bytes]:
    """Return the answers of GetAllocatableResources."""
    return _answers(contents.ALLOCATABLE)


def _answers(stem: str) -> list[bytes]:
    every = (answers.answer(files, stem) for files in frames())
    return list(dict.fromkeys(answer for answer in every if answer))


def pods_lists() -> list[bytes]:
    """Return the answers of the Pods API's ListPods."""
    lists = dict.fromkeys(answers.pods(files[contents.PODS]) for files in frames() if contents.PODS in files)
    return [v1alpha1_pb2.ListPodsResponse(pods=pods).SerializeToString() for pods in lists]


def nodes() -> Iterator[dict[str, bytes]]:
    """Return frames with the kubelet's answers as bytes: mutations of protobuf reach what JSON cannot say."""
    for files in frames():
        node = dict(files)
        for stem in (contents.LIST, contents.ALLOCATABLE):
            answer = answers.answer(files, stem)
            if answer is not None:
                node.pop(f"{stem}.json", None)
                node[f"{stem}.pb"] = answer
        yield node


def device_ids() -> list[str]:
    """Return a line for each resource and device id of the captures, and of claims."""
    lines: dict[str, None] = {}
    for answer in lists():
        for pod in v1_pb2.ListPodResourcesResponse.FromString(answer).pod_resources:
            for container in pod.containers:
                lines |= {f"{row.resource_name}\t{id_}": None for row in container.devices for id_ in row.device_ids}
                for claim in container.dynamic_resources:
                    lines |= {f"{device.driver_name}\t{device.device_name}": None for device in claim.claim_resources}
    return list(lines)


def choose_change(path: str) -> Change | None:
    """Return what changes a file of a node, by its format. The marker of gpumap's own PID stays as it is."""
    if path.endswith(".pb"):
        return changed_protobuf
    if path.endswith((".json", contents.CHECKPOINT, contents.DRA_STATE)):
        return changed_json
    return None if path.startswith("own/pid") else edited
