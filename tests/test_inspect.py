"""`gpumap inspect`: the columns and numbers of kubectl inspect gpushare and cgpu, and real use beside the grant.

The numbers of `REFERENCES` are those of two reference documents and of the original's own printer
(gpushare-device-plugin, cmd/inspect/display.go, 45fb8b8).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from hypothesis import given, settings

from gpumap.agent.published import published
from gpumap.cli.commands.inspect import (
    LEGEND,
    InspectedNode,
    inspect_nodes,
    inspect_table,
    inspect_values,
    known_bytes,
    select_node,
    unknown_sentences,
)
from gpumap.cli.rows import NodeMaps
from gpumap.cli.table import Shape
from gpumap.model.errors import FatalError
from gpumap.model.node import Device, Node
from gpumap.model.plugins import GPU_MEM
from gpumap.model.snapshot import Snapshot
from tests.command import run_command
from tests.demo_process import demo
from tests.examples import examples
from tests.generated import answer, runs
from tests.golden import CAPTURES
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid
from tests.shown import changed, values, with_devices

MIB = 1 << 20
TITAN_V, GTX_1080_TI, V100 = 12066, 11178, 16160
"""MiB: 11, 10 and 15 slots, as gpushare's plugin counts them."""


class Slots(NamedTuple):
    """What a pod is given of one card; `None` is an unknown card. `used` by a process it has."""

    pod: str
    card: int | None
    slots: int
    namespace: str = "ml"
    used: int = 0


def shared_out(name: str, address: str | None, cards: Sequence[int], *held: Slots, unit: int = GIB) -> Node:
    """A node with cards of so many MiB, which gpushare shares out."""
    each = cards[0] * MIB // unit
    offered = {GPU_MEM: [f"{gpu_uuid(card)}-_-{n}" for card in range(len(cards)) for n in range(each)]}
    node = TestNode([Gpu(index, total=size * MIB) for index, size in enumerate(cards)], allocatable=offered)
    pods: dict[tuple[str, str], Pod] = {}
    for number, one in enumerate(held):
        pod = pods.setdefault((one.namespace, one.pod), Pod(one.namespace, one.pod))
        container = f"c{number}"
        index = "-1" if one.card is None else str(one.card)
        visible = "no-gpu-has-4GiB-to-run" if one.card is None else index
        # The kubelet hands out whichever ids are free: they do not name the card.
        pod.ids[container] = {GPU_MEM: [f"{gpu_uuid(0)}-_-{1000 * number + n}" for n in range(one.slots)]}
        pod.answers[container, GPU_MEM] = answer(NVIDIA_VISIBLE_DEVICES=visible, ALIYUN_COM_GPU_MEM_IDX=index)
        if one.used:
            leaf = gpu_uuid(one.card or 0)
            node.processes.append(Process(100 + number, leaf, pod, container, memory=one.used))
    node.pods = list(pods.values())
    node.collect()
    return named(node.collect(), name, address)


def named(snapshot: Snapshot, name: str, address: str | None = None) -> Node:
    return changed(published(snapshot), name=name, internal_ip=address or "")


def table(*documents: Node, details: bool = False, used: bool = False) -> str:
    return inspect_table(inspect_nodes(documents), (), Shape(), details=details, used=used)


def notes(maps: NodeMaps, *, used: bool) -> list[str]:
    return unknown_sentences(maps, inspect_nodes(maps.maps), used=used)


def rows(*documents: Node, details: bool = False, used: bool = False) -> list[list[str]]:
    """The words of the table's lines."""
    return [line.split() for line in table(*documents, details=details, used=used).splitlines()]


def row_of(word: str, *documents: Node, details: bool = False, used: bool = False) -> list[str]:
    """The words of the one line that begins with a name, without it."""
    (found,) = [row for row in rows(*documents, details=details, used=used) if row[:1] == [word]]
    return found[1:]


def sums(*documents: Node, used: bool = False) -> list[str]:
    """The words of the cluster's sums."""
    (line,) = [one for one in table(*documents, used=used).splitlines() if "In Cluster: " in one]
    return line.partition(": ")[2].split()


# --- the numbers of the original --------------------------------------------------------------------------------------


def reference_000() -> list[Node]:
    first = [Slots(f"p{card}", card, slots) for card, slots in enumerate((4, 6, 10)) if slots]
    second = [Slots(f"p{card}", card, slots) for card, slots in enumerate((4, 0, 10, 9, 0, 10, 6, 6)) if slots]
    return [
        shared_out("192.168.68.4", "192.168.68.4", [GTX_1080_TI] * 8, *second),
        shared_out("192.168.3.4", "192.168.3.4", [TITAN_V] * 8, *first),
    ]


def reference_002(*held: Slots) -> list[Node]:
    return [shared_out("cn-hangzhou.192.168.2.167", "192.168.2.167", [V100], *held)]


def uneven() -> list[Node]:
    held = (Slots("a", 0, 4), Slots("b", 1, 11), Slots("waits", None, 3, "web"))
    return [
        shared_out("node-10", None, [V100] * 4, Slots("a", 0, 8), Slots("c", 2, 2)),
        shared_out("node-9", "10.0.0.9", [TITAN_V] * 2, *held),
    ]


APPS = (Slots("app-3g-v1-1", 0, 4, "default"), Slots("app-3g-v1-0", 0, 4, "default"))


REFERENCES = (
    (
        reference_000(),
        False,
        """
        NAME IPADDRESS GPU0(Allocated/Total) GPU1(Allocated/Total) GPU2(Allocated/Total) GPU3(Allocated/Total) \
            GPU4(Allocated/Total) GPU5(Allocated/Total) GPU6(Allocated/Total) GPU7(Allocated/Total) GPU Memory(GiB)
        192.168.3.4 192.168.3.4 4/11 6/11 10/11 0/11 0/11 0/11 0/11 0/11 20/88
        192.168.68.4 192.168.68.4 4/10 0/10 10/10 9/10 0/10 10/10 6/10 6/10 45/80
        Allocated/Total GPU Memory In Cluster: 65/168 (38%)
        """,
    ),
    (
        reference_002(),
        False,
        """
        NAME IPADDRESS GPU0(Allocated/Total) GPU Memory(GiB)
        cn-hangzhou.192.168.2.167 192.168.2.167 0/15 0/15
        Allocated/Total GPU Memory In Cluster: 0/15 (0%)
        """,
    ),
    (
        reference_002(*APPS),
        True,
        """
        NAME: cn-hangzhou.192.168.2.167 IPADDRESS: 192.168.2.167
        NAME NAMESPACE GPU0(Allocated)
        app-3g-v1-0 default 4
        app-3g-v1-1 default 4
        Allocated: 8 (53%) Total: 15
        Allocated/Total GPU Memory In Cluster: 8/15 (53%)
        """,
    ),
    (
        uneven(),
        False,
        """
        NAME IPADDRESS GPU0(Allocated/Total) GPU1(Allocated/Total) GPU2(Allocated/Total) GPU3(Allocated/Total) \
            PENDING(Allocated) GPU Memory(GiB)
        node-9 10.0.0.9 4/11 11/11 0/0 0/0 3 18/22
        node-10 unknown 8/15 0/15 2/15 0/15 10/60
        Allocated/Total GPU Memory In Cluster: 28/82 (34%)
        """,
    ),
    (
        uneven(),
        True,
        """
        NAME: node-9 IPADDRESS: 10.0.0.9
        NAME NAMESPACE GPU0(Allocated) GPU1(Allocated) Pending(Allocated)
        a ml 4 0 0
        b ml 0 11 0
        waits web 0 0 3
        Allocated: 18 (81%) Total: 22
        NAME: node-10 IPADDRESS: unknown
        NAME NAMESPACE GPU0(Allocated) GPU1(Allocated) GPU2(Allocated) GPU3(Allocated)
        a ml 8 0 0 0
        c ml 0 0 2 0
        Allocated: 10 (16%) Total: 60
        Allocated/Total GPU Memory In Cluster: 28/82 (34%)
        """,
    ),
)


@pytest.mark.parametrize(("documents", "details", "words"), REFERENCES)
def test_tables_have_the_columns_and_numbers_of_the_original(documents: list[Node], details: bool, words: str) -> None:
    """In the same order, whatever the blanks between them."""
    assert [row for row in rows(*documents, details=details) if row] == [
        line.split() for line in words.replace("\\\n", "").strip().splitlines()
    ]


def test_mib_slots_are_counted_as_such() -> None:
    """Where every card has slots of a MiB, so is the table's unit."""
    node = shared_out("node", None, [2048], Slots("a", 0, 300), unit=MIB)
    assert rows(node)[0][-2:] == ["GPU", "Memory(MiB)"]
    assert row_of("node", node) == ["unknown", "300/2048", "300/2048"]


def test_a_mixed_cluster_has_one_unit() -> None:
    """Slots of a MiB are GiB beside slots of a GiB; the original takes the first node's word for all."""
    small = shared_out("small", None, [2048], Slots("a", 0, 300), unit=MIB)
    large = shared_out("large", None, [V100], Slots("b", 0, 4))
    assert row_of("small", small, large) == ["unknown", "<1/2", "<1/2"]
    assert row_of("large", small, large) == ["unknown", "4/15", "4/15"]
    assert sums(small, large) == ["4/17", "(25%)"]


def test_nothing_to_show() -> None:
    """Without a node that has a GPU there are sums of nothing, and a sentence."""
    node = TestNode()
    node.collect()
    found = named(node.collect(), "cpu-only")
    for documents in ((), (found,)):
        for details in (False, True):
            assert table(*documents, details=details) == "Allocated/Total GPU Memory In Cluster: 0/0 (0%)\n"
        assert notes(NodeMaps(documents), used=False) == ["no GPU found"]


# --- grants of all kinds ----------------------------------------------------------------------------------------------


def on_cards(*pods: Pod, gpus: Sequence[Gpu] = (Gpu(0),), processes: Sequence[Process] = (), **more: object) -> Node:
    offered = {"nvidia.com/gpu": [str(leaf) for gpu in gpus for leaf in gpu.leaves]}
    node = TestNode(list(gpus), list(pods), list(processes), **{"allocatable": offered, **more})  # type: ignore[arg-type]
    node.collect()
    return named(node.collect(), "node")


def test_an_unknown_grant_is_not_nothing() -> None:
    """A GPU shared in time grants no memory: a dash; what is known beside it is a least amount."""
    shared = [Pod("ml", f"s{n}", {"main": {"nvidia.com/gpu.shared": [f"{gpu_uuid(0)}::{n}"]}}) for n in range(2)]
    whole = Pod("ml", "whole", {"main": {"nvidia.com/gpu": [str(gpu_uuid(1))]}})
    found = on_cards(*shared, whole, gpus=[Gpu(0), Gpu(1)])
    assert row_of("node", found) == ["unknown", "-/80", "80/80", ">=80/160"]
    assert sums(found) == [">=80/160", "(>=50%)"]
    assert row_of("s0", found, details=True) == ["ml", "-", "0"]
    alone = on_cards(*shared)
    assert sums(alone) == ["-/80", "(-)"]
    assert [one for one in notes(NodeMaps((alone,)), used=False) if ">=" in one]


def test_mig_devices_are_added_up_on_their_gpu() -> None:
    """A GPU's grants and memory are its MIG devices'. Compute instances share their GPU instance's: it counts once."""
    gpu = Gpu(0, mig=[(1, 0, 1), (1, 1, 1), (2, 0, 1)])
    one, two = (Pod("ml", f"ci{n}", {"main": {"nvidia.com/mig-1c": [str(mig_uuid(0, 1, n))]}}) for n in range(2))
    three = Pod("ml", "gi", {"main": {"nvidia.com/mig-1g": [str(mig_uuid(0, 2, 0))]}})
    found = on_cards(one, two, three, gpus=[gpu])
    assert [row_of(name, found, details=True)[1] for name in ("ci0", "ci1", "gi")] == ["10", "10", "10"]
    assert row_of("node", found) == ["unknown", "20/20", "20/20"]


def test_a_gpu_that_is_down_keeps_its_column() -> None:
    """What its memory is, is not known; neither is anything of one that has not reported its name."""
    pod = Pod("ml", "train", {"main": {"nvidia.com/gpu": [str(gpu_uuid(2))]}})
    found = on_cards(pod, gpus=[Gpu(0, fault="lost"), Gpu(1), Gpu(2)])
    assert row_of("node", found) == ["unknown", "-/-", "0/80", "80/80", ">=80/>=160"]
    assert [one for one in notes(NodeMaps((found,)), used=False) if one.startswith("GPU 0 is down")]


def test_without_nvml_nothing_is_in_a_wrong_column() -> None:
    """No card has an index: what is held is pending, cards are dashes, and the sums say that they are not whole."""
    dark = on_cards(Pod("ml", "train", {"main": {"nvidia.com/gpu": [str(gpu_uuid(0))]}}), down={"nvml"})
    assert table(dark).splitlines()[0].split()[:4] == ["NAME", "IPADDRESS", "PENDING(Allocated)", "GPU"]
    assert row_of("node", dark) == ["unknown", "-", "-/-"]
    assert row_of("train", dark, details=True) == ["ml", "-"]
    well = shared_out("well", None, [V100], Slots("a", 0, 4))
    assert row_of("node", dark, well) == ["unknown", "-/-", "-", "-/-"]
    assert sums(dark, well) == [">=4/>=15", "(-)"]
    assert any(
        one.startswith("node node: NVML does not answer")
        for one in notes(NodeMaps((dark, well), fleet=True), used=False)
    )


def test_an_old_list_is_no_list() -> None:
    """What it said is served for --stale-after. Then the holders are unknown: not 0, not even of one pod."""
    train = Pod("ml", "train", {"main": {"nvidia.com/gpu": [str(gpu_uuid(0))]}})
    offered = {"nvidia.com/gpu": [str(gpu_uuid(0)), str(gpu_uuid(1))]}
    node = TestNode([Gpu(0), Gpu(1)], [train], [Process(10, gpu_uuid(0), train)], offered)
    node.collect()
    node.down = {"kubelet"}
    young = named(node.collect(5.0), "node")
    assert row_of("node", young) == ["unknown", "80/80", "0/80", "80/160"]
    found = named(node.collect(90.0), "node")
    assert row_of("node", found) == ["unknown", "-/80", "-/80", "-/160"]
    assert sums(found) == ["-/160", "(-)"]
    assert row_of("train", found, details=True, used=True) == ["ml", "1/-", "0/-"]
    assert "the holders of all devices are not known" in notes(NodeMaps((found,)), used=False)


def in_part(found: Node, change: Callable[[Device], Device]) -> Node:
    """As an agent has it that does not measure all groups."""
    return changed(with_devices(found, change), collect=None)


def test_what_is_not_known_is_not_zero() -> None:
    """Neither what is granted of cards, nor which cards there are."""
    well = shared_out("well", None, [V100, V100], Slots("a", 0, 4))
    free = in_part(on_cards(gpus=[Gpu(0), Gpu(1)]), lambda device: changed(device, holders=None))
    assert row_of("node", free, well) == ["unknown", "-/80", "-/80", "-/160"]
    assert sums(free, well) == [">=4/190", "(>=2%)"]
    lost = in_part(on_cards(), lambda device: changed(device, gpu_uuid=None, index=None, memory=None))
    lost = changed(lost, gpus=())
    assert row_of("node", lost, well, used=True) == ["unknown", "-/-/-", "-/-/-", "-/0/-"]
    half = on_cards(gpus=[Gpu(0), Gpu(1)])
    half = with_devices(half, lambda device: changed(device, holders=None), 1)
    assert row_of("node", half) == ["unknown", "0/80", "-/80", "-/160"]
    assert "the holders of GPU 1 are not known" in notes(NodeMaps((half,)), used=False)


@settings(max_examples=examples(100))
@given(runs())
def test_every_node_can_be_inspected(run: list[Snapshot | TestNode]) -> None:
    """Each holder has a line, no sum is of more than its parts, and only what is known accuses a pod."""
    (node,) = run
    assert isinstance(node, TestNode)
    for _ in range(2):
        found = published(node.collect())
        for details, used in itertools.product((False, True), repeat=2):
            assert table(found, details=details, used=used)
        assert isinstance(notes(NodeMaps((found,)), used=True), list)
        holders = {(one.namespace, one.pod) for device in found.devices for one in device.containers if one.holds}
        (counted,) = inspect_nodes([found]) or (None,)
        assert holders <= (counted.pods.keys() if counted else set())
        if counted is not None:
            nothing_is_made_up(found, counted)


def nothing_is_made_up(seen: Node, node: InspectedNode) -> None:
    for index, gpu in enumerate(node.gpus):
        on_gpu = [shares[index] for shares in node.pods.values() if index in shares]
        assert sum(known_bytes(share.granted) for share in on_gpu) >= known_bytes(gpu.amounts.granted)
        assert gpu.is_over == any(share.is_over for share in on_gpu)
        assert None not in gpu.amounts.total or known_bytes(gpu.amounts.total) == 0
    for shares in node.pods.values():
        for share in shares.values():
            assert known_bytes(share.used) > known_bytes(share.granted) or not share.is_over
    used, granted, _ = node.amounts
    on_gpus = sum(known_bytes(gpu.amounts.granted) for gpu in node.gpus)
    assert known_bytes(granted) == on_gpus + known_bytes(node.pending or ())
    assert known_bytes(used) == sum(
        gpu.reading.memory.used_bytes for gpu in seen.gpus if gpu.reading and gpu.reading.memory
    )


# --- real use ---------------------------------------------------------------------------------------------------------


def test_use_is_beside_the_grant() -> None:
    """Of a card all that is used on it, whoever uses it; of a pod its own; over-use has a mark, and a word on it."""
    held = (Slots("greedy", 0, 4, used=9 * GIB), Slots("modest", 0, 4, used=3 * GIB), Slots("idle", 1, 2))
    node = shared_out("node", None, [V100] * 2, *held)
    assert rows(node, used=True)[0][2] == "GPU0(Used/Allocated/Total)"
    assert row_of("node", node, used=True) == ["unknown", "12!/8/15", "<1/2/15", "12/10/30"]
    assert sums(node, used=True) == ["12/10/30", "(40%/33%)"]
    assert LEGEND in table(node, used=True)
    assert row_of("greedy", node, details=True, used=True) == ["ml", "9!/4", "0/0"]
    assert row_of("modest", node, details=True, used=True) == ["ml", "3/4", "0/0"]
    assert row_of("idle", node, details=True, used=True) == ["ml", "0/0", "0/2"]
    assert "Allocated: 10 (33%)   Used: 12 (40%)   Total: 30" in table(node, details=True, used=True)


def test_a_squatter_is_over_and_has_a_line() -> None:
    """Who was granted nothing and uses a card is only seen with --used: nothing was allocated to it."""
    squatter = Pod("ml", "squat", {"main": {}})
    found = on_cards(squatter, processes=[Process(9, gpu_uuid(0), squatter, memory=5 * GIB)])
    assert row_of("squat", found, details=True, used=True) == ["ml", "5!/0"]
    assert not [row for row in rows(found, details=True) if row[:1] == ["squat"]]
    with pytest.raises(FatalError, match='unknown node "squat"; inspect shows nodes: did you mean `map squat`'):
        select_node(NodeMaps((found,)), "squat")


def test_unknown_use_is_a_dash() -> None:
    """Where processes are not visible, the card's use is known and the pods' is not: no pod is accused."""
    pod = Pod("ml", "train", {"main": {"nvidia.com/gpu": [str(gpu_uuid(0))]}})
    process = Process(9, gpu_uuid(0), pod, memory=5 * GIB)
    found = on_cards(pod, processes=[process], visible=False)
    assert row_of("train", found, details=True, used=True) == ["ml", "-/80"]
    assert row_of("node", found, used=True) == ["unknown", "5/80/80", "5/80/80"]
    assert [one for one in notes(NodeMaps((found,)), used=True) if one.startswith("the use of pods is not known")]
    assert notes(NodeMaps((found,)), used=False) == []


# --- for scripts, and of one node -------------------------------------------------------------------------------------


def test_values() -> None:
    """Bytes, with pods and use; what is not known, or in part, is null; and what is missing."""
    maps = NodeMaps((*uneven(), on_cards(down={"nvml"})), missing=("node-7 does not answer",))
    found = values(inspect_values(inspect_nodes(maps.maps), maps.missing))
    assert [node["node"] for node in found["nodes"]] == ["node", "node-9", "node-10"]
    assert found["missing"] == ["node-7 does not answer"]
    dark, nine, _ = found["nodes"]
    assert (dark["total_bytes"], dark["gpus"], dark["pending_bytes"]) == (None, [], None)
    assert (nine["allocated_bytes"], nine["total_bytes"], nine["pending_bytes"]) == (18 * GIB, 22 * GIB, 3 * GIB)
    assert nine["gpus"][1]["allocated_bytes"] == 11 * GIB
    assert nine["pods"][2]["gpus"] == [{"index": None, "allocated_bytes": 3 * GIB, "used_bytes": None, "over": False}]
    assert found["cluster"]["allocated_bytes"] == 28 * GIB


def test_one_node_of_many() -> None:
    """Only its table; an unknown name is an error, with the one that was probably meant."""
    maps = NodeMaps(tuple(uneven()))
    assert [node.name for node in inspect_nodes(select_node(maps, "node-9").maps)] == ["node-9"]
    assert select_node(maps, None) == maps
    with pytest.raises(FatalError, match='unknown node "nod-9"; did you mean node-9'):
        select_node(maps, "nod-9")


def test_the_sample_of_the_documentation() -> None:
    """What docs/how-to/whole-cluster.md shows is what is printed."""
    held = (Slots("app-6g-v1-0", 0, 4, "default", used=6 * GIB), Slots("train-0", 1, 6, used=5 * GIB))
    one = shared_out("192.168.3.4", "192.168.3.4", [TITAN_V] * 2, *held)
    other = shared_out("192.168.68.4", "192.168.68.4", [GTX_1080_TI] * 2, Slots("web", 0, 4))
    shown = [table(one, other), table(one, details=True, used=True)]
    text = (Path(__file__).parents[1] / "docs" / "how-to" / "whole-cluster.md").read_text()
    for sample in shown:
        assert sample in text, sample


# --- the installed command --------------------------------------------------------------------------------------------


@pytest.fixture(name="agent", scope="module")
def run_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running agent that plays a node of gpushare's."""
    capture = str(CAPTURES / "gpushare-gib")
    with demo(tmp_path_factory.mktemp("agent"), "--capture", capture) as url:
        yield url


inspect = partial(run_command, "inspect")


def test_an_agents_table(agent: str) -> None:
    for arguments in (("--url", agent), ("made-node", "--url", agent)):
        done = inspect("--used", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[1].split() == ["made-node", "unknown", "3/4/15", "10/15/15", "3", "14/22/30"]
    details = inspect("-d", "--url", agent).stdout.splitlines()
    assert [line.split()[0] for line in details[2:6]] == ["pair", "beside", "moved", "failed"]


def test_an_agents_values(agent: str) -> None:
    """JSON and YAML say the same, in bytes."""
    as_json, as_yaml = (inspect("--url", agent, "-o", form) for form in ("json", "yaml"))
    found = json.loads(as_json.stdout)
    assert (found["unit"], found["nodes"][0]["node"]) == ("GiB", "made-node")
    assert found["cluster"]["total_bytes"] == 30 * GIB
    assert yaml.safe_load(as_yaml.stdout) == found


def test_mistakes_in_flags(agent: str) -> None:
    for arguments, expected in (
        (("--sort-by", "name"), "unknown flag --sort-by; see gpumap inspect --help"),
        (("-o", "csv"), 'unknown value "csv"; valid values: table, json, yaml'),
        (("a", "b"), 'unexpected argument "b"'),
        (("",), "NODE: must not be empty"),
        (("--interval", "1s"), "--interval requires --watch"),
        *(
            (flags, f"unknown flag {flags[0]}")
            for flags in (("--prometheus", "http://prom"), ("--all",), ("--match", "a"))
        ),
    ):
        done = inspect("--url", agent, *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert expected in done.stderr
