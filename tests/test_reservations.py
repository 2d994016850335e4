"""GPUs that a scheduler shares among pods beside the kubelet: reservations, the owner `scheduled`, and shares."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpumap.agent.published import published
from gpumap.cli.commands.map import map_table
from gpumap.cli.commands.top import top_rows, top_table
from gpumap.cli.rows import NodeMaps
from gpumap.cli.table import Shape
from gpumap.model.observations import ScheduledShare
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner, PodUid
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid, owners, row
from tests.shown import waste_table

CARD, OTHER = gpu_uuid(0), gpu_uuid(1)
WHOLE = "nvidia.com/gpu"
GROUP = "5f1c4b5e-group"
OFFER = {WHOLE: [str(CARD), str(OTHER)]}


def reservation(uuid: Uuid = CARD, namespace: str = "kai-resource-reservation", group: str = GROUP) -> Pod:
    """The pod that keeps a GPU for KAI-Scheduler."""
    name = f"gpu-reservation-{uuid[-16:]}"
    return Pod(namespace, name, {"resource-reservation": {WHOLE: [str(uuid)]}}, groups=(group,))


def sharer(name: str, gpus: float | None = None, memory_bytes: int | None = None) -> Pod:
    """A pod that shares a GPU: the kubelet assigned it nothing."""
    share = ScheduledShare(PodUid(""), "main", group=GROUP, gpus=gpus, memory_bytes=memory_bytes)
    return Pod("ml", name, {"main": {}}, groups=(GROUP,), shares=(share,))


def node_with(*pods: Pod, **more: object) -> TestNode:
    """A node with two cards, of which a plugin offers both."""
    made = TestNode([Gpu(0), Gpu(1)], list(pods), allocatable=OFFER)
    return replace(made, **more)  # type: ignore[arg-type]


def found_kinds(snapshot: Snapshot) -> list[tuple[str, str]]:
    return [(one.finding, one.pod) for one in snapshot.node.findings or ()]


def test_pods_on_a_reserved_card_are_scheduled() -> None:
    """Each has its own use and none is a squatter. The reservation is neither idle nor granted anything."""
    keeper, one, two = reservation(), sharer("one"), sharer("two")
    node = node_with(keeper, one, two)
    node.processes = [Process(10, CARD, one, memory=3 * GIB, sm=0.4), Process(11, CARD, two, memory=GIB)]
    for _ in range(3):
        snapshot = node.collect(200.0)
        split = owners(snapshot, CARD)
        assert (split["scheduled"], split["assigned"], split["unassigned"], split["unknown"]) == (4 * GIB, 0, 0, 0)
    for pod, bytes_ in ((one, 3 * GIB), (two, GIB)):
        found = pod.row(snapshot, CARD)
        assert found.use is not None
        assert (found.use.memory_bytes, found.owner) == (bytes_, Owner.SCHEDULED)
    held = keeper.row(snapshot, CARD, "resource-reservation")
    assert (held.reservation, held.allocated_gpus, held.allocated_memory_bytes) == (True, None, None)
    assert found_kinds(snapshot) == []
    assert not [one for one in snapshot.node.accounts if one.allocated_gpu_seconds is not None]


@pytest.mark.parametrize(
    ("namespace", "name", "container", "is_one"),
    [
        ("runai-reservation", "anything", "main", True),
        ("kai-resource-reservation", "x", "y", True),
        ("kai-resource-reservation-2", "x", "y", False),
        ("ml", "gpu-reservation-0123456789abcdef", "resource-reservation", False),
        ("ml", "runai-reservation-gpu-node-a-x7k2p", "runai-reservation", False),
    ],
)
def test_only_the_namespace_makes_a_reservation(namespace: str, name: str, container: str, is_one: bool) -> None:
    """The whole namespace must match."""
    keeper, user = Pod(namespace, name, {container: {WHOLE: [str(CARD)]}}), Pod("ml", "user", {"main": {}})
    node = node_with(keeper, user)
    node.processes = [Process(10, CARD, user)]
    node.collect()
    snapshot = node.collect()
    assert keeper.row(snapshot, CARD, container).reservation is is_one
    assert (owners(snapshot, CARD).get("scheduled", 0), owners(snapshot, CARD)["unassigned"]) == (
        (GIB, 0) if is_one else (0, GIB)
    )
    snapshot = node.watch()
    assert (("idle", name) in found_kinds(snapshot)) is not is_one
    assert [one.pod for one in snapshot.node.accounts if one.allocated_gpu_seconds] == ([] if is_one else [name])


def test_a_reservation_on_a_card_that_another_one_holds_is_unassigned() -> None:
    """A scheduler shares a card among other pods. It grants nothing to the pods that reserve cards."""
    first, second = reservation(), reservation(OTHER, group="other-group")
    node = node_with(first, second)
    node.processes = [Process(10, OTHER, first, "resource-reservation")]
    node.collect()
    assert owners(node.collect(), OTHER)["unassigned"] == GIB


def test_reserved_mig_devices() -> None:
    """A reservation of a MIG device covers that one; of a partitioned GPU, all of its devices."""
    first, second = mig_uuid(0, 1, 0), mig_uuid(0, 2, 0)
    for held, expected in ((first, {first}), (CARD, {first, second})):
        user = Pod("ml", "user", {"main": {}})
        node = TestNode([Gpu(0, mig=[(1, 0, 3), (2, 0, 4)])], [reservation(held), user])
        node.allocatable = {WHOLE: [str(held)]}
        node.processes = [Process(10, first, user), Process(11, second, user)]
        node.collect()
        snapshot = node.collect()
        assert {leaf for leaf in (first, second) if owners(snapshot, leaf).get("scheduled")} == expected


def test_trusted_namespaces() -> None:
    """A pod there that uses a card without a grant is scheduled; holders and other namespaces are as ever."""
    rules = replace(RULES, is_trusted=lambda namespace: re.fullmatch("ray-.+", namespace) is not None)
    trusted, other = Pod("ray-a", "t", {"main": {}}), Pod("ray", "o", {"main": {}})
    holder = Pod("ray-a", "h", {"main": {WHOLE: [str(CARD)]}})
    node = node_with(trusted, other, holder, rules=rules)
    node.processes = [
        Process(10, CARD, trusted),
        Process(11, CARD, other, memory=2 * GIB),
        Process(12, CARD, holder, memory=3 * GIB),
    ]
    node.collect()
    split = owners(node.collect(), CARD)
    assert (split["scheduled"], split["unassigned"], split["assigned"]) == (GIB, 2 * GIB, 3 * GIB)


def test_tables_name_reservations_and_sharers() -> None:
    """`map`: the reservation has slots and no grant; sharers have shares and no slots, also if nothing is measured."""
    keeper, busy, idle = reservation(), sharer("busy", 0.5), sharer("idle", 0.25)
    node = node_with(keeper, busy, idle, reports_pods=True)
    node.processes = [Process(10, CARD, busy, memory=3 * GIB)]
    for visible, owners_shown in ((True, {"busy": "3.0GiB", "idle": "0"}), (False, {"busy": "-", "idle": "-"})):
        node.visible = visible
        node.collect()
        seen = NodeMaps((published(node.collect()),))
        cells = {line.split()[1]: line.split() for line in map_table(seen, Shape()).splitlines() if "  main  " in line}
        for pod, share in (("busy", "0.5"), ("idle", "0.25")):
            assert cells[pod][3:5] == ["0", share]
            assert (cells[pod][6], cells[pod][-1]) == (owners_shown[pod], "scheduled")
        lines = (line.split() for line in map_table(seen, Shape(wide=True)).splitlines())
        (line,) = (line for line in lines if "resource-reservation" in line[2:3])
        assert line[3:6] == ["1", "-", "-"]
        assert "reservation" in line
        shown = {row.container.pod: row.owner for row in top_rows(seen, Shape()) if row.container.namespace == "ml"}
        assert shown == {"busy": "scheduled", "idle": "scheduled"}
        (shown_line,) = (
            shown_line for shown_line in top_table(seen, Shape()).splitlines() if "resource-reservation  " in shown_line
        )
        assert shown_line.split()[-1] == "reservation"


def granted(snapshot: Snapshot, pod: Pod, uuid: Uuid = CARD) -> tuple[float | None, int | None] | None:
    """The share and the bytes of a pod that holds a device by a scheduler; `None`: it holds none."""
    found = row(snapshot, pod.full(), uuid)
    if found is None or not found.holds:
        return None
    assert (found.owner, found.slots) == (Owner.SCHEDULED, {})
    return found.allocated_gpus, found.allocated_memory_bytes


def test_idle_sharer_is_a_holder() -> None:
    """By the group of its reservation. Fraction and memory give each other, and its use is 0."""
    half, small = sharer("half", 0.5), sharer("small", memory_bytes=20 * GIB)
    node = node_with(reservation(), half, small, reports_pods=True)
    snapshot = node.collect()
    assert granted(snapshot, half) == (0.5, 40 * GIB)
    assert granted(snapshot, small) == (0.25, 20 * GIB)
    for pod in (half, small):
        used = pod.use(snapshot, CARD)
        assert (used.memory_bytes, used.processes, used.sm_ratio) == (0, 0, 0.0)
    (leaf,) = (leaf for leaf in snapshot.node.devices if leaf.uuid == CARD)
    assert leaf.holders == 3
    snapshot = node.watch()
    assert sorted(found_kinds(snapshot)) == [("idle", "half"), ("idle", "small")]
    assert granted(node_with(reservation(), half).collect(), half) is None, "the Pods API is off"


def test_shares_of_a_card_are_at_most_one() -> None:
    """Shares are scaled, bytes are not; the reservation's whole card does not count in addition."""
    pods = [sharer(f"p{number}", 0.5) for number in range(3)]
    snapshot = node_with(reservation(), *pods, reports_pods=True).collect()
    for pod in pods:
        gpus, memory_bytes = granted(snapshot, pod) or (None, None)
        assert (round(gpus or 0, 9), memory_bytes) == (0.333333333, 40 * GIB)
    assert sum(one.allocated_gpus or 0 for one in snapshot.containers) == pytest.approx(1)


def test_group_on_two_cards_is_on_neither() -> None:
    """KAI-Scheduler before 0.16 could make two reservations for one group: the card of a sharer is then unknown."""
    pod = sharer("one", 0.5)
    snapshot = node_with(reservation(), reservation(OTHER), pod, reports_pods=True).collect()
    assert (granted(snapshot, pod), granted(snapshot, pod, OTHER)) == (None, None)


@pytest.mark.parametrize(
    "share",
    [
        {"group": "", "uuid": CARD},
        {"group": "", "minor": 0},
        {"group": "", "minor": 0, "container": "", "container_id": "x"},
        {"group": "", "minor": 0, "container": ""},
    ],
    ids=["uuid", "minor", "unknown id", "no container"],
)
def test_shares_of_files(share: dict[str, object]) -> None:
    """They name the card themselves, and need no reservation for the owner. The only container needs no name."""
    pod = Pod("ml", "one", {"main": {}})
    base = ScheduledShare(pod.uid, "main", group=GROUP, memory_bytes=20 * GIB)
    node = node_with(pod, shares=(replace(base, **share),))  # type: ignore[arg-type]
    node.processes = [Process(10, CARD, pod, memory=GIB)]
    snapshot = node.collect()
    assert granted(snapshot, pod) == (0.25, 20 * GIB)
    assert owners(snapshot, CARD)["scheduled"] == GIB


@pytest.mark.parametrize(
    "change",
    [{"pod_uid": PodUid("another")}, {"group": "another"}, {"container": "init"}, {"group": "", "uuid": gpu_uuid(9)}],
    ids=["pod", "group", "container", "card"],
)
def test_share_of_something_unknown_is_none(change: dict[str, object]) -> None:
    """A note that does not fit makes no holder."""
    pod = Pod("ml", "one", {"main": {}})
    share = replace(ScheduledShare(pod.uid, "main", group=GROUP, gpus=0.5), **change)  # type: ignore[arg-type]
    snapshot = node_with(reservation(), pod, shares=(share,), reports_pods=True).collect()
    assert [one.name.pod for one in snapshot.containers if one.holds and not one.slots] == []


def test_two_notes_of_one_share_are_one_share() -> None:
    """A file of the container and the annotations of its pod: the file counts, the other completes it."""
    pod = sharer("one", 0.5)
    file = ScheduledShare(pod.uid, "main", minor=0, memory_bytes=10 * GIB)
    snapshot = node_with(reservation(), pod, reports_pods=True, shares=(file,)).collect()
    assert granted(snapshot, pod) == (0.5, 10 * GIB)


def test_annotations_give_no_card_that_no_reservation_holds() -> None:
    """Every user writes annotations: they excuse no squatter, and take nothing from the holder of the card."""
    holder = Pod("ml", "holder", {"main": {WHOLE: [str(CARD)]}})
    share = ScheduledShare(PodUid(""), "main", uuid=CARD, memory_bytes=80 * GIB)
    squatter = Pod("ml", "squatter", {"main": {}}, shares=(share,))
    node = node_with(holder, squatter, reports_pods=True)
    node.processes = [Process(10, CARD, squatter)]
    node.collect()
    snapshot = node.collect()
    assert owners(snapshot, CARD)["unassigned"] == GIB
    assert holder.row(snapshot, CARD).allocated_gpus == 1.0
    assert granted(snapshot, squatter) is None
    node = node_with(reservation(), squatter, reports_pods=True)
    assert granted(node.collect(), squatter) == (1.0, 80 * GIB), "KAI-Scheduler 0.18 writes it, and has a reservation"


def test_amount_above_the_card_is_no_amount() -> None:
    """What a user writes there neither grants more than there is nor takes from the other shares."""
    honest, other = sharer("honest", 0.5), sharer("other", memory_bytes=81 * GIB)
    snapshot = node_with(reservation(), honest, other, reports_pods=True).collect()
    assert (granted(snapshot, honest), granted(snapshot, other)) == ((0.5, 40 * GIB), (None, None))


def test_share_of_an_unknown_container_leaves_no_card_without_holders() -> None:
    """Somebody holds the card, and gpumap does not know who: the number of holders is unknown, not 0."""
    pod = Pod("ml", "one", {"main": {}, "side": {}}, has_links=False)
    share = ScheduledShare(pod.uid, container_id=pod.container_id("side"), uuid=CARD, memory_bytes=GIB)
    snapshot = node_with(pod, shares=(share,)).collect()
    counts = {leaf.uuid: None if leaf.may_have_more else leaf.holders for leaf in snapshot.node.devices}
    assert counts == {CARD: None, OTHER: 0}


def test_pod_outside_the_namespaces_of_reservations_changes_no_share() -> None:
    """Anybody may name a pod and its container like a reservation's, and give it the group of another team."""
    half = sharer("half", 0.5)
    node = node_with(reservation(), half, reports_pods=True)
    node.collect()
    before = node.collect()
    assert granted(before, half) == (0.5, 40 * GIB)
    forged = replace(reservation(OTHER, "ml"), name="gpu-reservation-x")
    node.pods.append(forged)
    node.collect()
    snapshot = node.collect()
    assert (granted(snapshot, half), granted(snapshot, half, OTHER)) == ((0.5, 40 * GIB), None)
    seconds = [
        next(one.allocated_gpu_seconds or 0 for one in page.node.accounts if one.name == half.full())
        for page in (before, snapshot)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(5.0), "10 s of half a GPU"
    holder = forged.row(snapshot, OTHER, "resource-reservation")
    assert (holder.reservation, holder.allocated_gpus) == (False, 1.0), "it is charged like any pod"
    node.pods = [half, forged]
    assert granted(node.collect(), half, OTHER) is None, "and gives none"


def test_annotation_of_a_device_needs_a_reservation_in_its_namespace() -> None:
    """A forged reservation does not make a pod a holder of its GPU either."""
    pod = sharer("one", memory_bytes=GIB)
    pod.shares = (replace(pod.shares[0], group="", uuid=OTHER),)
    node = node_with(reservation(OTHER, "ml"), pod, reports_pods=True)
    assert granted(node.collect(), pod, OTHER) is None
    node.pods = [reservation(OTHER), pod]
    assert granted(node.collect(), pod, OTHER) == (GIB / (80 * GIB), GIB)


@pytest.mark.parametrize("kept", [False, True], ids=["listed again", "kept"])
def test_pod_without_a_sign_of_the_scheduler_is_a_squatter(kept: bool) -> None:
    """The Pods API shows that the scheduler does not know a pod that uses its GPU."""
    thief, known = Pod("ml", "thief", {"main": {}}, may_share=False), sharer("one", 0.5)
    node = node_with(reservation(), thief, known, reports_pods=True)
    node.collect()
    if kept:
        node.drop_pod_events()
    node.processes = [Process(10, CARD, thief, memory=3 * GIB), Process(11, CARD, known)]
    for _ in range(3):
        snapshot = node.collect()
    split = owners(snapshot, CARD)
    assert (split["scheduled"], split["unassigned"]) == ((4 * GIB, 0) if kept else (GIB, 3 * GIB))
    assert (("squatter", "thief") in found_kinds(snapshot)) is not kept
    node.list_pods_again()
    node.collect()
    assert [kind for kind in found_kinds(node.collect()) if kind[0] == "squatter"] == [("squatter", "thief")]
    assert "SQUATTER" in waste_table(published(node.collect()), Shape())


@pytest.mark.parametrize(
    "change",
    [{"reports_pods": False}, {"rules": replace(RULES, is_trusted=lambda _: True)}, {"kept_pods": ()}],
    ids=["no Pods API", "trusted", "not reported"],
)
def test_pod_without_a_sign_is_scheduled_without_the_evidence(change: dict[str, object]) -> None:
    """Nothing accuses it: the reservation may be for it."""
    thief = Pod("ml", "thief", {"main": {}}, may_share=False)
    node = node_with(reservation(), thief, **{"reports_pods": True, **change})
    node.processes = [Process(10, CARD, thief)]
    for _ in range(3):
        snapshot = node.collect()
    assert owners(snapshot, CARD)["scheduled"] == GIB
    assert found_kinds(snapshot) == []


def test_pods_of_a_scheduler_without_groups_need_no_sign() -> None:
    """A reservation of another scheduler has no group, and gpumap does not know the signs of that scheduler."""
    keeper, user = replace(reservation(), groups=()), Pod("ml", "user", {"main": {}}, may_share=False)
    node = node_with(keeper, user, reports_pods=True)
    node.processes = [Process(10, CARD, user)]
    for _ in range(3):
        snapshot = node.collect()
    assert owners(snapshot, CARD)["scheduled"] == GIB
