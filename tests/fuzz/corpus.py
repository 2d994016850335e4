"""Examples to begin with: the files of every capture in tests/captures, as the sources of a node wrote them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from google.protobuf import json_format

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.agent._proto.pods import v1alpha1_pb2
from gpumap.lab.capture import answers, contents
from gpumap.lab.capture import format as on_disk
from gpumap.lab.capture.format import Capture
from gpumap.lab.node import files_of
from tests.golden import captures

SMALL_BYTES = 60_000
"""A larger capture is no example: mutations of it are slow, and reach nothing more."""


@functools.cache
def loaded() -> tuple[Capture, ...]:
    """Return every capture of a test."""
    return tuple(map(on_disk.load, captures()))


@functools.cache
def frames() -> tuple[dict[str, bytes], ...]:
    """Return the files of the frames of all small captures, each different one once."""
    every = (dict(frame.files) for capture in loaded() for frame in capture.frames)
    small = [files for files in every if sum(map(len, files.values())) < SMALL_BYTES]
    return tuple(files for number, files in enumerate(small) if files not in small[:number])


def files(name: str) -> list[bytes]:
    """Return the different contents of a file in the captures; `name` is its path, or the end of one."""
    found = (
        content for files in frames() for path, content in sorted(files.items()) if f"/{path}".endswith(f"/{name}")
    )
    return list(dict.fromkeys(found))


def lists() -> list[bytes]:
    """Return the answers of PodResources List."""
    return _answers(contents.LIST)


def offers() -> list[bytes]:
    """Return the answers of GetAllocatableResources."""
    return _answers(contents.ALLOCATABLE)


def _answers(stem: str) -> list[bytes]:
    found = (answers.answer(files, stem) for files in frames())
    return list(dict.fromkeys(answer for answer in found if answer))


def pods_lists() -> list[bytes]:
    """Return the answers of the Pods API's ListPods."""
    found = (answers.pods(files[contents.PODS]) for files in frames() if contents.PODS in files)
    return [v1alpha1_pb2.ListPodsResponse(pods=pods).SerializeToString() for pods in dict.fromkeys(found)]


def nodes() -> Iterator[dict[str, bytes]]:
    """Return frames with the kubelet's answers as bytes: mutations of protobuf reach what JSON cannot say."""
    for found in frames():
        node = dict(found)
        for stem in (contents.LIST, contents.ALLOCATABLE):
            answer = answers.answer(found, stem)
            if answer is not None:
                node.pop(f"{stem}.json", None)
                node[f"{stem}.pb"] = answer
        yield node


def device_ids() -> list[str]:
    """Return a line for each resource and device id of the captures, and of claims."""
    found: dict[str, None] = {}
    for text in lists():
        message = v1_pb2.ListPodResourcesResponse.FromString(text)
        for pod in json_format.MessageToDict(message).get("podResources", ()):
            for container in pod.get("containers", ()):
                for entry in container.get("devices", ()):
                    found |= {f"{entry.get('resourceName')}\t{id_}": None for id_ in entry.get("deviceIds", ())}
                for claim in container.get("dynamicResources", ()):
                    for one in claim.get("claimResources", ()):
                        found[f"{one.get('driverName')}\t{one.get('deviceName')}"] = None
    return list(found)


def paths() -> list[str]:
    """Return the paths that files of a captured node have on the node."""
    return sorted({path for frame in frames() for path in files_of(frame)})
