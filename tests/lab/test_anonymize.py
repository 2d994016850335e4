"""An anonymized capture gives the same page under other names, and none of the first ones is anywhere in it."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import tempfile
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.agent.sources.dra import parse_prepared, parse_state
from gpumap.lab.capture import anonymize, contents, replay
from gpumap.lab.capture import format as on_disk
from gpumap.lab.capture.pseudonyms import Pseudonyms
from gpumap.model import cgroups, device_ids
from gpumap.model.observations import ClaimPods, DeviceId, NvmlReading
from gpumap.model.readings import GpuReading
from gpumap.model.terms import PodUid
from tests import golden
from tests.captured import Claim, capture_of, found_in, secrets_of
from tests.examples import examples
from tests.generated import nodes
from tests.nodes import Gpu, Pod, TestNode, gpu_uuid

KEY = b"of this test"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def renamed(page: bytes, names: Pseudonyms) -> list[str]:
    """A page's lines, with other names in their labels."""
    by_label: dict[str, Callable[[str], str]] = {
        "namespace": names.namespace,
        "pod": names.pod,
        "pod_name": names.pod,
        "container": names.container,
        "node": names.node,
        "pod_uid": names.uid,
        "uid": names.uid,
        "workload": lambda work: work if work == "other" else names.cgroup(work),
        **dict.fromkeys(("uuid", "gpu_uuid", "gpu_id", "device_id"), names.device),
    }

    def rename(label: re.Match[str]) -> str:
        return f'{label[1]}="{by_label.get(label[1], str)(label[2])}"'

    return sorted(_LABEL.sub(rename, line) for line in page.decode().splitlines())


def rounded(lines: list[str]) -> list[str]:
    """Sums of shares go by the order of names, and their last digit by the order of the sum."""
    return sorted(re.sub(r"(?<= )[0-9]+\.[0-9]{12,}$", lambda found: f"{float(found[0]):.12g}", line) for line in lines)


async def check_law(capture: on_disk.Capture, page_before: bytes, said: Set[str] = frozenset()) -> None:
    names = Pseudonyms(KEY)
    other = anonymize.anonymize(capture, names)
    page = await replay.page(other)
    assert rounded(page.decode().splitlines()) == rounded(renamed(page_before, names))
    with tempfile.TemporaryDirectory() as folder:
        on_disk.write(other, Path(folder) / "other", page)
        assert found_in(Path(folder) / "other", secrets_of(capture) | said) == set()


RECORDABLE = [folder for folder in golden.captures() if not (folder / contents.PODS).exists()]
"""A recording has no answer of the Pods API."""


@pytest.mark.parametrize("folder", RECORDABLE, ids=lambda folder: folder.name)
async def test_the_page_is_the_same_under_other_names(folder: Path) -> None:
    """Every capture gives its own page, renamed, and no name of the node is left."""
    await check_law(on_disk.load(folder), (folder / on_disk.EXPECTED).read_bytes())


_NAME = st.from_regex(r"[a-z][a-z0-9]{2,9}(?:-[a-z0-9]{1,8}){0,3}", fullmatch=True)
_NASTY = st.sampled_from(
    [
        "acme",
        "acme-train",
        "acme-train-7",
        "cme-tra",
        "train",
        "gpumap",
        "mps",
        "kube-system",
        "default",
        "core",
        "vgpu",
    ]
)
"""Parts of each other, words of ids, and names that stay where they are a namespace's."""
_COMMS = ["python3", "train (2) x", "secret-app", "nvidia-cuda-mps", "nvidia-acmecorp", "app \N{GRINNING FACE}", "acme"]
_DRIVERS = ["gpu.nvidia.com", "gpu.vendor.example", "odd"]
_SAID = ["of tenant-bank", "var/acme-secret/x.sock", "/mnt/acme-corp x/proc", "gpu7.acme.example", "10.1.2.3:443"]
_SAID_NAMES = {"tenant-bank", "acme-secret", "acme-corp", "gpu7", "10.1.2.3"}


@st.composite
def odd_nodes(draw: st.DrawFn) -> TestNode:
    """Generated nodes with all kinds of names. Their sources may be down."""
    node = draw(nodes())
    namespaces = draw(st.lists(_NAME | _NASTY, min_size=2, max_size=2, unique=True))
    for pod in node.pods:
        pod.namespace = namespaces[pod.namespace == "ml"]
        pod.name = f"{draw(_NAME | _NASTY)}-{pod.name}"
    for process in node.processes:
        process.comm = draw(st.sampled_from(_COMMS))
    node.down = set(draw(st.lists(st.sampled_from(["kubelet", "nvml", "procfs"]), max_size=1)))
    node.visible = draw(st.sampled_from([True] * 4 + [False]))
    if "kubelet" in node.down:
        node.kubelet_reason = draw(st.sampled_from(["socket_missing", "unknown", "internal", "deadline_exceeded"]))
    node.checkpoint_readable = draw(st.sampled_from([True] * 4 + [False]))
    node.logs_readable = draw(st.sampled_from([True] * 4 + [False]))
    return node


@settings(max_examples=examples(25))
@given(odd_nodes(), st.data())
def test_generated_nodes_are_the_same_under_other_names(node: TestNode, data: st.DataObject) -> None:
    """Whatever is on a node, and whatever its sources report, its page is the same under other names."""
    claims = [
        Claim(pod, data.draw(_NAME | _NASTY), data.draw(st.sampled_from(_DRIVERS)), data.draw(_claimed(node)))
        for pod in node.pods
        if data.draw(st.booleans())
    ]
    words = [word for pod in node.pods for word in (pod.namespace, pod.name)]
    words += _SAID
    detail = " ".join(data.draw(st.lists(st.sampled_from(words), max_size=4)))
    capture = capture_of(node, claims, detail)
    asyncio.run(check_law(capture, asyncio.run(replay.page(capture)), _SAID_NAMES))


def _claimed(node: TestNode) -> st.SearchStrategy[str]:
    """The name of a claim's device: a device's own, one that is not there, or a plugin's."""
    there = [str(uuid) for gpu in node.gpus for uuid in (gpu.uuid, *gpu.leaves)]
    return st.sampled_from([*there, f"GPU-{UUID}", "gpu-0-mig-1g5gb-19-0", "acme-gpu"])


@given(st.sets(st.text("0123456789abcdef", min_size=12, max_size=64), max_size=20))
def test_ids_stay_apart_and_cut_ones_stay_the_beginning(ids: set[str]) -> None:
    """Two ids never become one, and an id that was cut off is the beginning of the whole, as it was."""
    names = Pseudonyms(KEY)
    others = {id_: names.container_id(id_) for id_ in ids}
    assert len(set(others.values())) == len(ids)
    assert all(other.startswith(names.container_id(id_[:12])) for id_, other in others.items())


@given(st.lists(st.from_regex(r"[a-z0-9]{1,2}", fullmatch=True), unique=True, max_size=120))
def test_names_stay_apart_even_the_shortest(found: list[str]) -> None:
    """Two names never become one, though there are few short ones; the same name is always the same."""
    names = Pseudonyms(KEY)
    others = [names.pod(name) for name in found]
    assert len(set(others)) == len(found)
    assert others == [names.pod(name) for name in found]


UUID = "b1028956-cfa2-0990-bf4a-5da9abb51763"


@pytest.mark.parametrize(
    "id_",
    [
        f"GPU-{UUID}",
        f"GPU-{UUID}::3",
        f"MIG-{UUID}",
        f"MIG-{UUID}::12",
        f"MIG-GPU-{UUID}/3/0",
        f"GPU-{UUID}-_-14",
        f"GPU-{UUID}-9",
        f"GPU-{UUID}-memory-12",
        "nvidia0/gi3/vgpu0",
        "tencent.com/vcuda-memory-268435456-30",
        "0-123",
        "0000:3b:00.0",
        "gpu-0-mig-1g5gb-19-0",
        "all",
    ],
)
def test_device_ids_keep_their_form(id_: str) -> None:
    """Another id means the same as the first did, of another device; what names no device stays."""
    other = Pseudonyms(KEY).device(id_)
    same = re.sub("[0-9a-f]{8}-[0-9a-f-]{27}", UUID, other)
    assert same == id_
    assert (other == id_) == (UUID not in id_)
    before, after = (device_ids.parse(DeviceId(one)) or device_ids.parse_dra(one) for one in (id_, other))
    assert before is not None
    assert after is not None
    assert (before.shape, type(before.device)) == (after.shape, type(after.device))


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods/besteffort/pod{UUID}/{'7f' * 32}",
        f"/kubepods.slice/kubepods-pod{UUID.replace('-', '_')}.slice/cri-containerd-{'7f' * 32}.scope",
        f"/kubepods/burstable/pod{'9c' * 16}/{'7f' * 32}",
        f"/../../kubepods-pod{UUID.replace('-', '_')}.slice/crio-{'7f' * 32}.scope (deleted)",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/jane.scope",
        "/../../system.slice/jane.service",
        "/docker/jane",
        "/",
    ],
)
def test_cgroup_paths_keep_their_meaning(path: str) -> None:
    """A path that was a pod's is one, one of the host stays the host's; people and their numbers are gone."""
    own = cgroups.own("0::/system.slice/gpumap.service")
    other = Pseudonyms(KEY).cgroup(path)
    before, after = (cgroups.parse(f"0::{one}", own) for one in (path, other))
    assert (before.kind, len(before.pods)) == (after.kind, len(after.pods))
    assert [bool(pod.container_id) for pod in before.pods] == [bool(pod.container_id) for pod in after.pods]
    assert "jane" not in other
    assert "1000" not in other
    assert len(other) == len(path)


def test_order_and_free_text_reveal_nothing() -> None:
    """Pods, rows and ids are in the new names' order; what people and sources wrote is gone."""
    capture = on_disk.load(golden.CAPTURES / "kubelet-1.36")
    down = {"procfs": contents.Down("unreadable", f"/home/jane/proc: of GPU-{UUID}, permission denied")}
    files = {**capture.frames[0].files, contents.DOWN: contents.down_text(down)}
    other = anonymize.anonymize(on_disk.Capture(capture.about, (on_disk.Frame(0.0, files),)), Pseudonyms(KEY))
    content = other.frames[0].files
    rows = json.loads(content[contents.CHECKPOINT])["Data"]["PodDeviceEntries"]
    assert [json.dumps(row, sort_keys=True) for row in rows] == sorted(json.dumps(row, sort_keys=True) for row in rows)
    lines = content[contents.LOG_TREE].decode().splitlines()
    assert lines == sorted(lines)
    assert contents.down(content)["procfs"] == contents.Down("unreadable", "")
    assert other.about.description == ""
    assert "kubelet 1.36" not in other.about.origin


@pytest.mark.parametrize(
    "detail",
    [
        'UNKNOWN failed to get pod "acme-train-7" of tenant-bank',
        "no socket at var/acme-secret/kubelet.sock",
        "/mnt/acme corp/proc: No such file or directory",
        "connect to gpu7.acme.example (10.1.2.3:443) failed",
    ],
)
def test_of_a_source_that_is_down_stays_the_reason_alone(detail: str) -> None:
    """Whatever a source said, in whatever form it named things, it is gone; a reason that is no word of ours is too."""
    capture = on_disk.load(golden.CAPTURES / "kubelet-restart")
    down = {
        "kubelet": contents.Down("unknown", detail),
        "checkpoint": contents.Down("checkpoint_corrupt", detail),
        "pod_logs": contents.Down("acme_train", detail),
        "procfs": contents.Down(detail, detail),
    }
    nvml = contents.Down("driver_not_loaded", detail)
    files = {contents.DOWN: contents.down_text(down), contents.NVML: contents.reading_text(nvml)}
    files[contents.OWN_PID_IN_TREE] = detail.encode()
    other = anonymize.anonymize(replace(capture, frames=(on_disk.Frame(0.0, files),)), Pseudonyms(KEY)).frames[0].files
    reasons = {"kubelet": "unknown", "checkpoint": "checkpoint_corrupt", "pod_logs": "unknown", "procfs": "unknown"}
    assert contents.down(other) == {source: contents.Down(reason, "") for source, reason in reasons.items()}
    assert contents.reading(other) == contents.Down("driver_not_loaded", "")
    assert other[contents.OWN_PID_IN_TREE] == b""


def test_a_fault_of_a_gpu_is_a_known_reason() -> None:
    """Another capture may say anything there."""
    reading = NvmlReading("1", "2", "3", (GpuReading(0, fault="acme", refusals={"nvmlX": 999, "of acme": 999}),))
    capture = on_disk.load(golden.CAPTURES / "kubelet-restart")
    files = {**capture.frames[0].files, contents.NVML: contents.reading_text(reading)}
    other = anonymize.anonymize(replace(capture, frames=(on_disk.Frame(0.0, files),)), Pseudonyms(KEY))
    gpu = GpuReading(0, fault="unknown", refusals={"nvmlX": 999, "": 999})
    assert contents.reading(other.frames[0].files) == NvmlReading("1", "2", "3", (gpu,))


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=30))
def test_nothing_but_known_punctuation_is_left_of_a_path(name: str) -> None:
    """Emoji, dashes that look like dashes, other alphabets: none stays, and the length does."""
    path = f"/system.slice/{name}.scope"
    for other in (Pseudonyms(KEY).cgroup(path), Pseudonyms(KEY).device(path)):
        assert re.fullmatch(r"[A-Za-z0-9/._:=,;@()+ -]*", other)
        assert len(other) == len(path)


def test_a_hierarchy_of_ones_own_is_renamed() -> None:
    """Of a line of `cgroup`, the kernel's controllers stay, and nothing else."""
    content = b"12:name=systemd:/\n3:net_cls,net_prio,perf_event:/\n1:name=acme:/\nacme:cpu:/\n"
    capture = on_disk.load(golden.CAPTURES / "kubelet-restart")
    files = {**capture.frames[0].files, "own/cgroup": content}
    other = anonymize.anonymize(replace(capture, frames=(on_disk.Frame(0.0, files),)), Pseudonyms(KEY))
    lines = other.frames[0].files["own/cgroup"].splitlines()
    assert lines[:2] == content.splitlines()[:2]
    assert lines[3] == b"0:cpu:/"
    assert b"acme" not in lines[2]


def test_what_cannot_be_read_cannot_be_renamed_and_is_left_out() -> None:
    """An answer that is no message and a checkpoint that is no JSON are left out, and the capture says why."""
    capture = on_disk.load(golden.CAPTURES / "mig")
    files = {name: content for name, content in capture.frames[0].files.items() if not name.startswith("kubelet/")}
    files |= {"kubelet/list.pb": b"\xff secret-pod", contents.CHECKPOINT: b"{ secret"}
    files |= {"proc/101/cgroup": b"secret", "proc/101/stat": b"secret"}
    files |= {contents.DRA_STATE: b"{ secret", contents.DRA_CHECKPOINT: b"secret"}
    other = anonymize.anonymize(on_disk.Capture(capture.about, (on_disk.Frame(0.0, files),)), Pseudonyms(KEY))
    content = other.frames[0].files
    assert b"secret" not in b"".join(content.values())
    assert not content.keys() & {contents.DRA_STATE, contents.DRA_CHECKPOINT}
    assert {name: why.reason for name, why in contents.down(content).items()} == {
        "kubelet": "decode",
        "checkpoint": "checkpoint_corrupt",
    }


def test_claims_are_renamed_in_all_that_names_them() -> None:
    """List, kubelet's state and driver's checkpoint name one claim, and one share, by the same other name."""
    pod = Pod("acme", "train", {"main": {}})
    node = TestNode([Gpu(0)], [pod])
    names = Pseudonyms(KEY)
    claims = [Claim(pod, "acme-gpus", "gpu.nvidia.com", "gpu-0"), Claim(pod, "acme-nic", "nic.example", "eth-acme")]
    content = anonymize.anonymize(capture_of(node, claims), names).frames[0].files
    entries, _ = parse_state(content[contents.DRA_STATE])
    assert set(entries) == {
        ClaimPods(names.namespace("acme"), names.claim(claim.name), (PodUid(names.uid(pod.uid)),)) for claim in claims
    }
    devices, _ = parse_prepared(content[contents.DRA_CHECKPOINT])
    assert {one.claim for one in devices} == {one.claim for one in entries}
    assert devices[0].uuid == names.device(gpu_uuid(0))
    listed = v1_pb2.ListPodResourcesResponse.FromString(content["kubelet/list.pb"]).pod_resources[0].containers[0]
    # A claim without a GPU is only a name.
    assert {one.claim_name: [d.device_name for d in one.claim_resources] for one in listed.dynamic_resources} == {
        names.claim("acme-gpus"): ["gpu-0"],
        names.claim("acme-nic"): [""],
    }


def test_alloc_resp_is_renamed_within() -> None:
    """The environment that names GPUs names others, in the same order."""
    capture = on_disk.load(golden.CAPTURES / "kubelet-1.36")
    names = Pseudonyms(KEY)
    rows = json.loads(anonymize.anonymize(capture, names).frames[0].files[contents.CHECKPOINT])["Data"]
    two = names.device("GPU-8f3c1e2a-6b1d-4c57-9a0e-2f4d7b9c1a10,GPU-c0ffee00-1234-4abc-8def-0123456789ab")
    found = [base64.b64decode(row["AllocResp"]) for row in rows["PodDeviceEntries"]]
    assert any(b"NVIDIA_VISIBLE_DEVICES" in one and two.encode() in one for one in found)
