"""Cgroup paths of every runtime and driver, as the host, a container or a nested kubelet sees them."""

import pytest

from gpumap.model.cgroups import is_bare_host, is_outside, own, parse
from gpumap.model.names import PodUid
from gpumap.model.observations import CgroupKind, PodCgroup

UID = "2c48913c-b29f-11e7-9350-020968147796"
UID_ = UID.replace("-", "_")
STATIC = "09a70ae9ccc491e651e5c773579b3490"
CID = "0537ac6c84027b804ba9fa205cc9043ef6bcbc8467dafa6b88b30aa7f4adf18e"
INNER = "1" * 64
POD = PodCgroup(PodUid(UID), CID)
SERVICE = own("0::/system.slice/gpumap.service\n")
PRIVATE = own("0::/\n")
OWN_UID = "99999999-0000-4000-8000-000000000000"
HOST_VIEW = own(f"0::/kubepods/besteffort/pod{OWN_UID}/{INNER}\n")
KUBEPODS = "/kubepods.slice/kubepods-burstable.slice"


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods/burstable/pod{UID}/{CID}",
        f"/kubepods/besteffort/pod{UID}/{CID}",
        f"/kubepods/pod{UID}/{CID}",
        f"/kubepods/pod{UID}/crio-{CID}",
        f"{KUBEPODS}/kubepods-burstable-pod{UID_}.slice/cri-containerd-{CID}.scope",
        f"/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{CID}.scope",
        f"{KUBEPODS}/kubepods-burstable-pod{UID_}.slice/crio-{CID}.scope",
        f"{KUBEPODS}/kubepods-burstable-pod{UID_}.slice/crio-{CID}.scope/container",
        f"{KUBEPODS}/kubepods-burstable-pod{UID_}.slice/docker-{CID}.scope",
        f"/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{CID}",
        "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
        f"kubelet-kubepods-burstable-pod{UID_}.slice/cri-containerd-{CID}.scope",
        f"/system.slice/docker-{INNER}.scope/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{CID}.scope",
        f"/docker/{INNER}/kubelet/kubepods/burstable/pod{UID}/{CID}",
        f"/custom/root/kubepods/burstable/pod{UID}/{CID}",
        f"/kubepods/burstable/pod{UID}/{CID}/init.scope",
        f"/kubepods/burstable/pod{UID}/{CID}/docker/{INNER}",
        f"/../../kubepods-besteffort-pod{UID_}.slice/cri-containerd-{CID}.scope",
        f"/../../pod{UID}/{CID}",
        f"/../../../pod{UID}/{CID}",
    ],
)
def test_pod_and_container_of_a_path(path: str) -> None:
    """Every runtime's and driver's path gives the pod's UID and the outermost container in it."""
    assert parse(f"0::{path}\n", PRIVATE) == parse(f"8:pids:{path}\n", PRIVATE)
    assert parse(f"0::{path}\n", PRIVATE).kind is CgroupKind.POD
    assert parse(f"0::{path}\n", PRIVATE).pods == (POD,)


def test_static_pod_has_a_hash_for_a_uid() -> None:
    """32 hex digits without dashes are a UID as well."""
    found = parse(f"0::/kubepods/besteffort/pod{STATIC}/{CID}\n", PRIVATE)
    assert found.pods == (PodCgroup(PodUid(STATIC), CID),)


def test_hybrid_hierarchies_are_read_on_all_lines() -> None:
    """A bare line of one hierarchy does not hide what the others say."""
    found = parse(f"9:name=systemd:/\n4:memory:/kubepods/pod{UID}/{CID}\n0::/\n", PRIVATE)
    assert found.pods == (POD,)


def test_kubelet_in_a_pod_leaves_both_outermost_first() -> None:
    """Kubernetes in a pod has two UIDs in its paths."""
    outer = f"/kubepods/burstable/pod{OWN_UID}/{INNER}"
    found = parse(f"0::{outer}/kubelet/kubepods/pod{UID}/{CID}\n", PRIVATE)
    assert found.pods == (PodCgroup(PodUid(OWN_UID), INNER), POD)


def test_outer_pod_of_gpumap_itself_does_not_count() -> None:
    """Where the kubelet runs in a pod, gpumap does too: its own path begins with that pod."""
    outer = f"/kubepods/burstable/pod{OWN_UID}/{INNER}/kubelet/kubepods"
    inside = own(f"0::{outer}/pod{UID[:-1]}0/{CID}\n")
    assert parse(f"0::{outer}/pod{UID}/{CID}\n", inside).pods == (POD,)
    assert parse(f"0::/kubepods/burstable/pod{OWN_UID}/{INNER}\n", inside).pods == (PodCgroup(PodUid(OWN_UID), INNER),)
    beside = own(f"0::/kubepods/burstable/pod{OWN_UID}/{INNER}\n")
    assert len(parse(f"0::{outer}/pod{UID}/{CID}\n", beside).pods) == 2


def test_hierarchies_that_name_different_pods_are_unknown() -> None:
    """A process that chose one of its paths is not charged to the pod of the first line."""
    found = parse(f"4:memory:/kubepods/pod{UID}/{CID}\n0::/kubepods/pod{OWN_UID}/{INNER}\n", PRIVATE)
    assert (found.kind, found.pods) == (CgroupKind.UNKNOWN, ())
    assert not is_outside(f"4:memory:/kubepods/pod{UID}/{CID}\n0::/kubepods/pod{OWN_UID}/{INNER}\n", HOST_VIEW)


def test_hierarchy_that_shows_less_agrees() -> None:
    """A hierarchy may end at the pod, or at the outer one of two pods. Two containers of one pod are no container."""
    outer = f"/kubepods/burstable/pod{OWN_UID}/{INNER}"
    nested = f"4:memory:{outer}/kubelet/kubepods/pod{UID}/{CID}\n5:pids:{outer}\n0::/kubepods/burstable/pod{OWN_UID}\n"
    assert parse(nested, PRIVATE).pods == (PodCgroup(PodUid(OWN_UID), INNER), POD)
    two = f"4:memory:/kubepods/pod{UID}/{CID}\n0::/kubepods/pod{UID}/{INNER}\n"
    assert parse(two, PRIVATE).pods == (PodCgroup(PodUid(UID), ""),)


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods/burstable/podmy-static-pod/{CID}",
        f"/kubepods/burstable/pod{UID.upper()}/{CID}",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}x.slice/crio-{CID}.scope",
        f"/../../podmy-static-pod/{CID}",
        f"/kubepods/podmy-static-pod/{INNER}/kubepods/pod{UID}/{CID}",
    ],
)
def test_pod_with_an_odd_uid_is_unknown(path: str) -> None:
    """A pod's directory with a UID of another form is some pod's, not the host's, and not that of a pod below it."""
    assert parse(f"0::{path}\n", SERVICE) == parse(f"4:memory:{path}\n0::/\n", SERVICE)
    assert parse(f"0::{path}\n", SERVICE).kind is CgroupKind.UNKNOWN


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (f"/system.slice/cri-containerd-{CID}.scope", CgroupKind.UNKNOWN),
        (f"/system.slice/crio-{CID}.scope", CgroupKind.UNKNOWN),
        (f"/k8s.io/{CID}", CgroupKind.UNKNOWN),
        (f"/../../../system.slice/cri-containerd-{CID}.scope", CgroupKind.UNKNOWN),
        (f"/docker/{CID}", CgroupKind.HOST),
        ("/system.slice/gpud.service", CgroupKind.HOST),
    ],
)
def test_container_outside_of_pods_has_its_id(path: str, kind: CgroupKind) -> None:
    """With `cgroupsPerQOS: false` no pod is in the path. A container of a CRI runtime is never the host's."""
    found = parse(f"0::{path}\n", SERVICE)
    assert (found.kind, found.pods, found.container_id) == (kind, (), CID if CID in path else "")


@pytest.mark.parametrize(
    "path",
    [
        f"/docker/{CID}",
        f"/system.slice/docker-{CID}.scope",
        f"/machine.slice/libpod-{CID}.scope/container",
        "/user.slice/user-1000.slice/session-1.scope",
        "/system.slice/display-manager.service",
        "/podman/pod-of-somebody",
        "/../../../../system.slice/containerd.service",
        "/../../..",
    ],
)
def test_processes_in_no_pod_are_the_hosts(path: str) -> None:
    assert parse(f"0::{path}\n", PRIVATE).kind is CgroupKind.HOST


SESSION = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize("path", [f"{SESSION}/pod{UID}/{CID}", f"{SESSION}/kubepods/burstable/podx/{CID}"])
def test_a_user_names_no_pod(path: str) -> None:
    """The directories in a login session are its user's: they prove no pod, unless gpumap is in the session, too."""
    for reader in (SERVICE, PRIVATE, HOST_VIEW, own("0::/user.slice/user-1001.slice/session-1.scope\n")):
        assert parse(f"0::{path}\n", reader).kind is CgroupKind.UNKNOWN
        assert parse(f"2:pids:/\n1:memory:{path}\n", reader).kind is CgroupKind.UNKNOWN
    inside = parse(f"0::{SESSION}/pod{UID}/{CID}\n", own(f"0::{SESSION}/app.slice/gpumap.service\n"))
    assert inside.pods == (POD,)


def test_a_user_names_no_container_of_a_pod() -> None:
    """Nor is a container of a pod in a session. A session in a container changes nothing."""
    assert parse(f"0::{SESSION}/docker-{CID}.scope\n", SERVICE).container_id == ""
    assert parse(f"0::/system.slice/docker-{CID}.scope/user.slice/user-0.slice\n", SERVICE).container_id == CID
    assert parse(f"0::/kubepods/pod{UID}/{CID}/user.slice/user-0.slice\n", SERVICE).pods == (POD,)


def test_bare_root_is_unknown_where_our_own_path_is_root() -> None:
    """`0::/` may be gpumap's own container, if gpumap sees itself at `/`; otherwise it is the host's root."""
    assert parse("0::/\n", PRIVATE).kind is CgroupKind.UNKNOWN
    assert parse("0::/\n", SERVICE).kind is CgroupKind.HOST
    assert parse(f"0::/../cri-containerd-{CID}.scope\n", PRIVATE).kind is CgroupKind.UNKNOWN
    assert parse("", SERVICE).kind is CgroupKind.UNKNOWN


@pytest.mark.parametrize(
    ("path", "ours", "outside"),
    [
        (f"/../../kubepods-pod{UID_}.slice/cri-containerd-{CID}.scope", PRIVATE, True),
        ("/../../../../system.slice/kubelet.service", PRIVATE, True),
        ("/../../..", PRIVATE, True),
        (f"/../../docker/{CID}", PRIVATE, True),
        (f"/../cri-containerd-{CID}.scope", PRIVATE, False),
        (f"/../crio-{CID}.scope/container", PRIVATE, False),
        (f"/../{CID}", PRIVATE, False),
        ("/", PRIVATE, False),
        ("/init.scope", PRIVATE, False),
        (f"/kubepods/pod{UID}/{CID}", HOST_VIEW, True),
        ("/system.slice/kubelet.service", HOST_VIEW, True),
        ("/", HOST_VIEW, True),
        (f"/kubepods/besteffort/pod{OWN_UID}/{CID}", HOST_VIEW, False),
        (f"/kubepods/pod{UID}/{CID}", SERVICE, True),
        ("/system.slice/kubelet.service", SERVICE, False),
    ],
)
def test_what_is_certainly_outside_our_own_pod(path: str, ours: object, outside: bool) -> None:
    """Other pods and the node's own processes are; containers beside ours, and what is uncertain, are not."""
    assert is_outside(f"0::{path}\n", ours) is outside


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("0::/system.slice/gpumap.service\n", True),
        ("4:memory:/user.slice/session-1.scope\n0::/\n", True),
        ("0::/\n", False),
        ("", False),
        (f"0::/docker/{CID}\n", False),
        (f"0::/kubepods/pod{UID}/{CID}\n", False),
        ("0::/../..\n", False),
    ],
)
def test_bare_host(text: str, bare: bool) -> None:
    assert is_bare_host(own(text)) is bare


ATTACKER, VICTIM = "11111111-2222-3333-4444-555555555555", "22222222-2222-3333-4444-555555555555"
CONTAINER = f"/../../kubepods-burstable-pod{ATTACKER.replace('-', '_')}.slice/cri-containerd-{'a' * 64}.scope"


@pytest.mark.parametrize(
    "below",
    [
        f"/pod{VICTIM}/{'c' * 64}",
        f"/kubepods.slice/kubepods-pod{VICTIM}.slice/cri-containerd-{'c' * 64}.scope",
        f"/kubepods-podx/{'c' * 64}",
        f"/docker/{'d' * 64}",
        "/user.slice/user-0.slice/session-1.scope",
        "/user@0.service/app.slice/x.service",
        "/job_1/step_0",
        "/lxc/victim",
        "/pod (deleted)",
        f"/\u2028pod{VICTIM}",
        f"{'/x' * 1500}/pod{VICTIM}",
    ],
)
@pytest.mark.parametrize("text", ["0::{0}{1}\n", "12:cpu:{0}{1}\n1:name=systemd:{0}\n0::{0}\n"], ids=["v2", "v1"])
def test_a_container_stays_in_its_pod_whatever_its_own_cgroups_are_called(text: str, below: str) -> None:
    """A container that may make cgroups names them as it likes: it is neither another pod's, nor the host's."""
    found = parse(
        text.format(CONTAINER, below), own(f"0::/../../kubepods-pod{OWN_UID}.slice/cri-containerd-{CID}.scope\n")
    )
    assert (found.pods[0].pod_uid, found.pods[0].container_id) == (ATTACKER, "a" * 64)
