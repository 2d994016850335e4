"""Cgroup paths of work outside pods, of each runtime, scheduler and service manager, and what they name."""

from __future__ import annotations

import pytest

from gpumap.model.cgroups import own, parse, paths
from gpumap.model.node import Workload
from gpumap.model.observations import CgroupKind
from gpumap.model.workloads import workload

A = "4f1c9e0b7a2d" + "5" * 52
P = "b" * 64
SHORT = A[:12]
HOME = "/user.slice/user-1000.slice/user@1000.service"
UUID = "4706fe54-7802-4808-aa7e-ae8b567239e0"
ALICE = ("user", "1000")
ROOT = ("user", "0")
"""The user of the process: nothing in the path names its work."""
PATHS = [
    (f"/system.slice/docker-{A}.scope", "docker", SHORT),
    (f"/docker/{A}", "docker", SHORT),
    (f"/docker/{A}/init.scope", "docker", SHORT),
    (f"/ml.slice/docker-{A}.scope", "docker", SHORT),
    (f"{HOME}/user.slice/docker-{A}.scope", *ALICE),
    (f"{HOME}/app.slice/docker.service", *ALICE),
    ("/system.slice/docker.service", "systemd_unit", "docker.service"),
    (f"/system.slice/docker-{A}.scope/docker/{P}", "docker", SHORT),
    (f"/machine.slice/libpod-{A}.scope/container", "podman", SHORT),
    (f"/machine.slice/machine-libpod_pod_{P}.slice/libpod-{A}.scope", "podman", SHORT),
    (f"{HOME}/user.slice/libpod-{A}.scope/container", *ALICE),
    (f"{HOME}/user.slice/user-libpod_pod_{P}.slice/libpod-{A}.scope/container", *ALICE),
    (f"/libpod_parent/libpod-{A}", "podman", SHORT),
    (f"/system.slice/vllm.service/libpod-payload-{A}", "podman", "vllm.service"),
    (f"/machine.slice/libpod-conmon-{A}.scope", "podman", SHORT),
    (f"/system.slice/nerdctl-{A}.scope", "containerd", SHORT),
    (f"{HOME}/user.slice/nerdctl-{A}.scope", *ALICE),
    (f"/default/{A}", "containerd", SHORT),
    (f"/k8s.io/{A}", "containerd", SHORT),
    ("/system.slice/containerd.service", "systemd_unit", "containerd.service"),
    ("/slurm/uid_1000/job_42/step_0/task_0", "slurm_job", "42"),
    ("/slurm_node1/uid_1000/job_42/step_extern", "slurm_job", "42"),
    ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", "slurm_job", "42"),
    ("/system.slice/node1_slurmstepd.scope/job_42/step_interactive/user/task_0", "slurm_job", "42"),
    ("/hpc.slice/slurmstepd.scope/job_42/step_3+1/user/task_special", "slurm_job", "42"),
    ("/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0", "slurm_job", "s5K1KKYAYG5D00"),
    ("/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/slurm", "slurm_job", "s5K1KKYAYG5D00"),
    ("/system.slice/slurmstepd.scope/system", "systemd_unit", "slurmstepd.scope"),
    ("/system.slice/slurmd.service", "systemd_unit", "slurmd.service"),
    ("/srv/job_42/data", *ROOT),
    ("/pbs_jobs.service/jobid/42.pbs01", "pbs_job", "42.pbs01"),
    ("/pbs_jobs.service/jobid/42[3].pbs01", "pbs_job", "42[3].pbs01"),
    ("/htcondor/_var_lib_condor_execute_slot1_1@node7", "htcondor_slot", "slot1_1@node7"),
    (
        "/system.slice/condor.service/htcondor/_var_lib_condor_execute_slot1_1@node7",
        "htcondor_slot",
        "slot1_1@node7",
    ),
    ("/system.slice/apptainer-4711.scope", *ROOT),
    (f"{HOME}/user.slice/apptainer-4711.scope", *ALICE),
    ("/lxc.payload.web", "lxc", "web"),
    ("/lxc.payload.web/system.slice/ollama.service", "lxc", "web"),
    ("/lxc.payload.proj_web/init.scope", "lxc", "proj_web"),
    (f"/lxc.payload.web/system.slice/docker-{A}.scope", "lxc", "web"),
    ("/lxc/101/ns/system.slice/ollama.service", "lxc", "101"),
    ("/lxc.monitor.web", *ROOT),
    ("/system.slice/ollama.service", "systemd_unit", "ollama.service"),
    ("/system.slice/system-vllm.slice/vllm@llama.service", "systemd_unit", "vllm@llama.service"),
    ("/system.slice/jupyter-alice-singleuser.service", "systemd_unit", "jupyter-alice-singleuser.service"),
    ("/user.slice/user-1000.slice/session-3.scope", *ALICE),
    ("/user.slice/user-120.slice/session-c1.scope", "user", "120"),
    (f"{HOME}/app.slice/vllm.service", *ALICE),
    (f"{HOME}/app.slice/app-gnome-org.gnome.Terminal-4711.scope", *ALICE),
    (f"{HOME}/tmux-spawn-0267755b-4639-4a27-90ed-f19f88e53748.scope", *ALICE),
    (f"{HOME}/app.slice/snap.firefox.firefox-{UUID}.scope", *ALICE),
    ("/system.slice/snap.ollama.listener.service", "systemd_unit", "snap.ollama.listener.service"),
    (f"/system.slice/snap.ollama.ollama-{UUID}.scope", *ROOT),
    ("/wsl-user/distro-4668/systemd/system.slice/ollama.service", "systemd_unit", "ollama.service"),
    (f"/wsl-user/distro-4668/systemd{HOME}/user.slice/docker-{A}.scope", *ALICE),
    (f"/../../../system.slice/docker-{A}.scope", "docker", SHORT),
    ("/system.slice/run-r3f0c2.scope", *ROOT),
    ("/system.slice/run-r3f0c2.service", *ROOT),
    ("/system.slice/run-u12.service", *ROOT),
    ("/system.slice/run-p4711-i4712.service", *ROOT),
    (f"/system.slice/nightly-{UUID}.service", *ROOT),
    ("/system.slice/system-sshd.slice/sshd@3-10.0.0.1:22-10.0.0.2:5555.service", *ROOT),
    (f"{HOME}/job_42/step_0", *ALICE),
    ("/system.slice/jupyterhub.service/job_42/step_0", "systemd_unit", "jupyterhub.service"),
    ("/system.slice/jupyterhub.service/s5K1KKYAYG5D00/step_0", "systemd_unit", "jupyterhub.service"),
    ("/system.slice/jupyterhub.service/user.slice/user-1000.slice/x", "systemd_unit", "jupyterhub.service"),
    (
        f"/machine.slice/systemd-nspawn@web.service/payload{HOME}/app.slice",
        "systemd_unit",
        "systemd-nspawn@web.service",
    ),
    (
        "/machine.slice/machine-web.scope/payload/user.slice/user-1000.slice/session-1.scope",
        "systemd_unit",
        "machine-web.scope",
    ),
    ("/machine.slice/machine-web.scope/payload/system.slice/ollama.service", "systemd_unit", "machine-web.scope"),
    (
        r"/machine.slice/machine-qemu\x2d1\x2dwin.scope/libvirt/emulator",
        "systemd_unit",
        r"machine-qemu\x2d1\x2dwin.scope",
    ),
    ("/ml.slice/train-a.scope", "systemd_unit", "train-a.scope"),
    ("/system.slice/run-p4711-i4712.scope", *ROOT),
    (f"{HOME}/app.slice/vllm.service/libpod-payload-{A}", *ALICE),
    (f"/../user@1000.service/libpod-payload-{A}", *ALICE),
    (f"{HOME}/lxc.payload.x", *ALICE),
    (f"{HOME}/user.slice/user-0.slice/session-1.scope", *ALICE),
    (f"/user/alice/0/docker/{A}", *ROOT),
    (f"/system.slice/jupyterhub.service/docker/{A}", "systemd_unit", "jupyterhub.service"),
    ("/system.slice/jupyterhub.service/htcondor/slot1@x", "systemd_unit", "jupyterhub.service"),
    (f"/system.slice/run-u12.service/docker-{A}.scope", *ROOT),
    ("/init.scope", *ROOT),
    ("/", *ROOT),
    (f"/system.slice/docker-{A}.scope (deleted)", "docker", SHORT),
]


@pytest.mark.parametrize(
    ("path", "kind", "name"), PATHS, ids=[path.replace(A, "A").replace(P, "P") for path, *_ in PATHS]
)
def test_a_path_names_the_work(path: str, kind: str, name: str) -> None:
    """A container, a job, a unit or a user; the process's own user if the path names none of them."""
    assert (workload(paths(f"0::{path}\n")) or Workload(*ROOT)) == Workload(kind, name)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["/slurm/uid_1000/job_42/step_batch", "/", "/system.slice/slurmd.service"], Workload("slurm_job", "42")),
        (["/slurm/uid_1000/job_42/step_extern", f"{HOME}/docker-{A}.scope"], Workload("slurm_job", "42")),
        ([f"/user/alice/0/docker/{A}", "/user.slice/user-1000.slice/session-1.scope"], Workload(*ALICE)),
        (["/system.slice/sshd.service", f"{HOME}/lxc.payload.x"], Workload(*ALICE)),
    ],
    ids=["a job and slurmd", "ssh into a job", "names in a session of cgroup v1", "a unit and a session"],
)
def test_every_line_of_a_v1_file_counts(lines: list[str], expected: Workload) -> None:
    """A container or job may be on some controllers only. It counts before a session, and a unit comes last."""
    for order in (lines, lines[::-1]):
        text = "".join(f"{number}:controller{number}:{path}\n" for number, path in enumerate(order, 1))
        assert workload(paths(text)) == expected


@pytest.mark.parametrize("line_break", ["\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
@pytest.mark.parametrize("forged", ["slurmstepd.scope/job_42/step_0", f"kubepods/pod{UUID}/{A}"], ids=["job", "pod"])
def test_the_name_of_a_directory_is_no_line_of_its_own(line_break: str, forged: str) -> None:
    """A user who names directories puts a process into no job and into no pod: only a line feed ends a line."""
    text = f"0::{HOME}/app.slice/a{line_break}0::/system.slice/{forged}\n"
    assert len(paths(text)) == 1
    if "pod" not in forged:
        assert workload(paths(text)) == Workload(*ALICE)


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods.slice/kubepods-pod{UUID.replace('-', '_')}.slice/cri-containerd-{A}.scope/system.slice/"
        "slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0",
        f"/system.slice/docker-{A}.scope/kubelet.slice/kubelet-kubepods-pod{UUID.replace('-', '_')}.slice/"
        f"cri-containerd-{P}.scope",
    ],
    ids=["Slurm in a pod", "a kubelet in docker"],
)
def test_a_pod_is_no_work_of_the_host(path: str) -> None:
    assert parse(f"0::{path}\n", own("0::/system.slice/gpumap.service\n")).kind is CgroupKind.POD


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"{HOME}/pod{UUID}/{A}", ALICE),
        (f"{HOME}/kubepods/burstable/podx/{A}", ALICE),
        (f"/system.slice/jupyterhub.service/kubepods/pod{UUID}/{A}", ("systemd_unit", "jupyterhub.service")),
        (f"/system.slice/docker-{A}.scope/kubelet.slice/kubelet-kubepods-pod{UUID}.slice/{P}", ("docker", SHORT)),
        (f"/kubepods.slice/kubepods-pod{UUID}.slice/cri-containerd-{A}.scope", None),
        (f"/kubepods/burstable/podx/{A}", None),
    ],
)
def test_without_a_kubelet_the_name_of_a_pod_frees_no_user(path: str, expected: tuple[str, str] | None) -> None:
    """What is outside the pod decides, also for a kubelet in docker. Any other pod is unknown."""
    for reader in ("0::/system.slice/gpumap.service\n", "0::/\n"):
        kind = parse(f"0::{path}\n", own(reader), has_kubelet=False).kind
        assert (kind is CgroupKind.HOST) == (expected is not None)
    assert expected is None or workload(paths(f"0::{path}\n")) == Workload(*expected)
