"""Remedies: what a user does about each reason of a source, GPU, slot, finding or capability.

Each text first says what is wrong, in at most eight words, and then the first thing to do. The page, `doctor` and
/api/v1/map show these texts; docs/how-to/troubleshoot.md has short ones. Other reasons have no remedy. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpumap.model.terms import Source

OF_GPUS = ("process_utilization", "gpm", "xid_events")
"""Capabilities that depend on the GPUs."""

_BY_MOUNT = "If it is already set, request the GPUs by a mount instead (docs/how-to/install)."
_RESET = "`pkill -USR1 -x gpumap; sleep 2; nvidia-smi --gpu-reset -i <index>` on the node"
_FROM_FILES = "Until then, gpumap takes names from files."
_NO_SQUATTER = "Until it answers, gpumap reports no squatter."
_ALLOW = "Run as user 0. If SELinux denies the connection, allow it."

SOURCES: dict[Source, dict[str, str]] = {
    Source.KUBELET: {
        "socket_missing": "The kubelet's socket is missing. Mount its directory `pod-resources`; for another root, set "
        "`kubelet.rootDir` or `--kubelet-root`.",
        "connection_refused": "The kubelet is down or restarting. If it stays down, run `systemctl status kubelet` on "
        "the node.",
        "permission_denied": f"gpumap may not connect to the kubelet. {_ALLOW}",
        "rate_limited": "The kubelet gets too many calls. Find the other client on this node.",
        "deadline_exceeded": "The kubelet hangs or is overloaded. Check its log and the load of the node.",
        "message_too_large": "The answer is larger than 24 MiB. Update the kubelet (kubernetes/kubernetes#141335).",
        "unimplemented": "This kubelet has no PodResources API. Use Kubernetes 1.15 or later.",
        "unavailable": "The kubelet drops the connection. Check its log.",
        "decode": "gpumap cannot read the kubelet's answer. Report it with `gpumap record`.",
        "no_descriptors": "gpumap cannot open more files. Raise its limit (`ulimit -n`, `fs.file-max`).",
        "no_threads": "gpumap cannot start more threads. Raise its limit (`ulimit -u`, `pids.max`, `podPidsLimit`).",
        "duplicate_claims": "The kubelet lists a claim's devices repeatedly. Find out why that pod does not start, and "
        "update the kubelet (kubernetes/kubernetes#141335).",
        "odd_name": "The kubelet lists an invalid name. Do nothing: gpumap escapes and cuts such names.",
    },
    Source.NVML: {
        "library_not_found": "The driver's library is missing. Set `runtimeClassName: nvidia` or `nvml.hostPath`; "
        f"outside Kubernetes, install the driver or set `--nvml-library`. {_BY_MOUNT}",
        "driver_not_loaded": "The driver is not loaded. Load it on the node: `nvidia-smi` must work there.",
        "driver_version_mismatch": "Library and kernel module of the driver differ. Wait a minute. If the error "
        "remains, drain the node and reboot it.",
        "unknown": "NVML cannot be initialized. Run `nvidia-smi` on the node. If it works there, gpumap's container "
        "lost its device nodes: gpumap exits, and its next container gets them.",
        "no_permission": "gpumap lacks the GPU's device nodes. Use `runtimeClassName: nvidia` or NVIDIA's CDI. "
        f"{_BY_MOUNT}",
        "hung": "A driver call on this GPU hangs. Cordon the node, then reset the GPU. If that fails, drain the node "
        "and reboot it.",
        "deadline_exceeded": "The whole driver does not answer. Look for Xid lines in `dmesg`. Then drain the node and "
        "reboot it.",
        "lost": "The GPU fell off the bus. Cordon the node, drain it and reboot it. If it happens again, check the "
        "hardware.",
        "reset_required": f"The GPU requires a reset. Drain the node, then run {_RESET}.",
        "worker_crashed": "The driver's library crashed gpumap's worker. Report it to NVIDIA with its version.",
        "worker_oom_killed": "gpumap's container reached its memory limit. Raise it (`resources.limits.memory`).",
        "not_supported": "The driver refuses a value that it reported. Wait. If it remains, report it to NVIDIA.",
        "worker_start": "gpumap cannot start its worker process. Check the limits of memory, processes and open files.",
        "protocol": "gpumap's worker sent an invalid message. Report it as a bug of gpumap.",
    },
    Source.PROCFS: {
        "unreadable": "gpumap may not read all of /proc. Run as user 0, without `hidepid` on the node's /proc.",
        "deadline_exceeded": "/proc does not answer. Look at `dmesg`: a process hangs in the kernel.",
    },
    Source.POD_IDENTITY: {
        "checkpoint_missing": "The kubelet's device checkpoint is missing. Mount the kubelet's directory "
        "`device-plugins` (`privileges.checkpoint=true`).",
        "checkpoint_corrupt": "The kubelet's device checkpoint is damaged. Wait: the kubelet writes it at the next "
        "allocation.",
        "checkpoint_unreadable": "gpumap cannot read the kubelet's device checkpoint. Run as user 0, and mount its "
        "directory, not the file.",
        "checkpoint_row": "Rows of the device checkpoint are incomplete. Do nothing: gpumap reads the others.",
        "plugin_answer": "gpumap cannot read a device plugin's answer. Report it with `gpumap record --anonymize`.",
        "pod_logs_missing": "The log directories of pods are missing. Mount `/var/log/pods` "
        "(`privileges.podLogs=true`) or set `--pod-log-root`.",
        "pod_logs_unreadable": "gpumap cannot read the log directories. Run as user 0. If there are more than 16384, "
        "delete ended pods.",
        "pods_api_socket_missing": "The kubelet's Pods API is missing. Use Kubernetes 1.37 or the gate `PodsAPI`, and "
        f"mount the directory `pods-api` (`privileges.podsApi=true`). {_FROM_FILES}",
        "pods_api_connection_refused": f"The kubelet is down or restarting. Wait until it returns. {_FROM_FILES}",
        "pods_api_failed_precondition": "The kubelet does not know its pods yet. Wait until it reaches the API server. "
        f"{_FROM_FILES}",
        "pods_api_unimplemented": "The server has no Pods API. Check the path `--pods-api-socket`.",
        "pods_api_permission_denied": f"gpumap may not connect to the Pods API. {_ALLOW}",
        "pods_api_stream_ended": "The kubelet ended its stream of pods. Wait: gpumap connects again each second. "
        f"{_FROM_FILES}",
        "pods_api_decode": "The answer is not from a kubelet. Check `--pods-api-socket`.",
        "gpu_fractioning_missing": "KAI-Scheduler's fractiond does not run here. Start it (0.18 and later, "
        "`global.gpuSharingMode: NvFractions`), and mount its directory (`privileges.gpuFractioning=true`). "
        f"{_NO_SQUATTER}",
        "gpu_fractioning_unreadable": "gpumap cannot read a file of fractiond. Run as user 0. Each file has at most 64 "
        "KiB.",
        "gpu_fractioning_corrupt": "gpumap cannot parse a file of fractiond. Report it with `gpumap record`.",
        "dra_state_unreadable": "gpumap cannot read the kubelet's `dra_manager_state`. Run as user 0. Its maximum size "
        "is 24 MiB.",
        "dra_state_corrupt": "gpumap cannot parse the kubelet's `dra_manager_state`. Report it with `gpumap record`.",
        "dra_state_row": "Claims in the kubelet's `dra_manager_state` are incomplete. Do nothing: gpumap reads the "
        "others.",
        "dra_state_stale_mount": "The mounted `dra_manager_state` is an old one. Mount its directory, not the file.",
        "dra_checkpoint_unreadable": "gpumap cannot read the DRA driver's `checkpoint.json`. Run as user 0. Its "
        "maximum size is 24 MiB.",
        "dra_checkpoint_corrupt": "gpumap cannot parse the DRA driver's `checkpoint.json`. Report it with `gpumap "
        "record`.",
        "dra_checkpoint_row": "Devices in the DRA driver's `checkpoint.json` are incomplete. Do nothing: gpumap reads "
        "the others.",
        "dra_checkpoint_stale_mount": "The mounted `checkpoint.json` is an old one. Mount the DRA driver's directory "
        "(`privileges.dra=true`), not the file.",
        "deadline_exceeded": "The kubelet's files do not answer. Check the disk of the node.",
    },
}

FAULTS: dict[str, str] = {
    "lost": SOURCES[Source.NVML]["lost"],
    "reset_required": SOURCES[Source.NVML]["reset_required"],
    "insufficient_power": "The GPU lacks power. Check its power cables.",
    "irq_issue": "The kernel has no interrupt for this GPU. Check the firmware's settings. Then drain the node and "
    "reboot it.",
    "no_permission": SOURCES[Source.NVML]["no_permission"],
    "hung": SOURCES[Source.NVML]["hung"],
    "worker_crashed": SOURCES[Source.NVML]["worker_crashed"],
    "unknown": "NVML gives no reason. Run `nvidia-smi -q -i <index>` and `dmesg` on the node.",
    "not_in_nvml": "NVML does not list this GPU. Run `dmesg | grep NVRM` on the node. After `RmInitAdapter failed`, "
    "drain the node and reboot it.",
}
"""By fault reason of a GPU, worst first."""

RECOVERY: dict[str, str] = {
    "gpu_reset": f"The driver requests a reset. End all work on the GPU, then run {_RESET}.",
    "drain_and_reset": "The GPU works with reduced capacity. Start no new work on it. When its work has ended, run "
    f"{_RESET}.",
    "drain_p2p": "The driver requests an end of P2P. End work with transfers between GPUs (NVLink, P2P).",
    "bus_reset": "The driver requests a PCIe bus reset. Drain the node, and reset the bus from the host.",
    "recover_imex_domain": "The driver requests recovery of the IMEX domain. Check `nvidia-imex` on all its nodes.",
    "node_reboot": "The driver requests a reboot. Drain the node and reboot it. A reset of the GPU is not enough.",
    "system_reboot": "The driver requests a reboot of the system. Drain all nodes of the system, then reboot it.",
}
"""By the recovery action that the driver requests."""

UNMATCHED: dict[str, str] = {
    "unparsed": "gpumap cannot parse this device plugin's ids. Report them with `gpumap record --anonymize`.",
    "untrusted_id": "These ids do not name the GPU. Mount the kubelet's directory `device-plugins` "
    "(`privileges.checkpoint=true`); for MIG devices of NVIDIA's DRA driver its checkpoint (`privileges.dra=true`).",
    "not_in_nvml": "The driver does not list this GPU. A virtual machine may own it: then nothing is wrong. If it was "
    "re-partitioned or removed, restart the device plugin, then the pod.",
    "device_down": "A GPU has not reported its identity. Find the GPU that does not answer.",
    "nvml_down": "The driver does not answer. Repair it first.",
    "assigned_twice": "Two pods hold the same device. Delete one of them. The kubelet may have lost its checkpoint.",
}
"""By reason of slots that match no device, or that another pod holds too."""

NO_JOB_CGROUP = "Slurm puts jobs into no cgroup. Set `TaskPlugin=task/cgroup` in slurm.conf."
"""If processes of slurmstepd use GPUs in no job's cgroup."""

FINDINGS: dict[str, str] = {
    "not_offered": "No container can be assigned this GPU. Check the device plugin's pod and its log. If that is on "
    "purpose, do nothing.",
    "squatter": "The pod uses a GPU without holding it. Find how it gets access (privileged, "
    "`NVIDIA_VISIBLE_DEVICES=all`), then ask its owner.",
    "leftover": "The pod no longer exists. End its processes on the node (`kill <PID>`).",
    "unexplained": "No process explains it. Run `fuser -v /dev/nvidia*` on the node, and look in other PID namespaces. "
    f"If there is no process, end all work on the GPU, and run {_RESET}.",
    "over": "The container uses more memory than granted. Request a larger share, or limit its memory (vLLM: "
    "`--gpu-memory-utilization`).",
    "stalled": "It may wait for a failed peer. Look at its log and its stack (`py-spy dump --pid <PID>`).",
    "idle": "The pod does not use its GPU. Ask its owner whether it still needs it.",
    "maybe_idle": "The pod may not use its GPU. Ask its owner whether it still works.",
    "admin_access_unknown": "Its claim may have admin access. Mount the DRA driver's directory "
    "`plugins/gpu.nvidia.com` (`privileges.dra=true`).",
    "unused": "The container needs less than its grant. Request a smaller share or MIG device, or share the GPU.",
}
"""By kind or reason of a finding. Faults and unmatched slots have the remedy of their reason."""

CAPABILITIES: dict[str, str] = {
    "pid_visibility": "gpumap measures no use of containers. Set `privileges.hostPID=true` (`hostPID: true`); with "
    "Docker, `--pid=host`.",
    "device_checkpoint": "Pod UIDs are not certain. Mount the kubelet's directory `device-plugins` "
    "(`privileges.checkpoint=true`). Its file exists once the first device plugin registers.",
    "pod_logs": "gpumap cannot name the containers of processes. Mount `/var/log/pods` and `/var/log/containers` "
    "(`privileges.podLogs=true`).",
    "process_utilization": "gpumap measures no SM time of containers. Do nothing: the driver does not report it on MIG "
    "devices, vGPU guests and WSL.",
    "gpm": "gpumap measures no activity of SMs. Check `--nvml-release` and `--collect`. It needs Hopper or later.",
    "push": "gpumap sees new pods only at intervals. Mount the kubelet's directory `device-plugins` "
    "(`privileges.checkpoint=true`), without `--no-push`.",
    "xid_events": "gpumap counts no XID errors. See `dmesg` for them, and check `--nvml-release` and `--collect`.",
}
"""By capability that is 0."""

HEALTH: dict[str, str] = {
    "ecc_uncorrected": "Memory errors of this GPU destroyed data. Check the jobs that ran on it. If the number grows, "
    "run NVIDIA's field diagnostic.",
    "row_remap_pending": f"Bad memory rows wait for a reset. When it suits, drain the node, and run {_RESET}.",
    "row_remap_failure": "The GPU cannot replace bad memory rows. Drain the node, and run NVIDIA's field diagnostic.",
    "xid_errors": "The GPU had XID errors. Read `dmesg` on the node, and NVIDIA's catalog of XID errors. Usually an "
    "application causes 13, 31, 43, 45, 68 and 109, and the GPU causes other codes.",
}
"""By what is wrong with a GPU that answers. The application's codes: health.go of NVIDIA's k8s-device-plugin."""

FATAL_XIDS: dict[int, str] = {
    **dict.fromkeys(
        (46, 62, 110, 119, 120, 142, 143, 151, 156, 158),
        f"The GPU had a fatal error. Drain the node, then run {_RESET}. If the error comes back, report it to NVIDIA.",
    ),
    **dict.fromkeys(
        (48, 64, 95, 140),
        f"Memory of this GPU is broken. Drain the node, then run {_RESET}. If the error comes back, run NVIDIA's field "
        "diagnostic.",
    ),
    **dict.fromkeys(
        (74, 136, 155),
        f"An NVLink failed. Drain the node, then run {_RESET}. If the error comes back, check `nvidia-smi nvlink -e`.",
    ),
    54: FAULTS["insufficient_power"],
    79: FAULTS["lost"],
}
"""By XID code that EKS's node monitoring agent 1.7 counts as fatal, without 63 and 109. With 63 the driver marked bad
memory for replacement, and work continues. NVIDIA's device plugin counts 109 as an error of the application. What to do
is in short what docs.nvidia.com/health-validation/reference/checks/xid says: drain, reset, have it serviced."""

IN_SHORT: dict[str, str] = {
    "lost": "fell off the bus: drain the node, then reboot it",
    "reset_required": "requires a reset: drain the node, then reset it",
    "insufficient_power": "lacks power: check its power cables",
    "irq_issue": "has no interrupt: check the firmware, drain and reboot",
    "hung": "hangs: cordon the node, then reset the GPU",
    "not_in_nvml": "on PCI, not in NVML: see NVRM in dmesg",
    "gpu_reset": "requires a reset: end its work, then reset it",
    "drain_and_reset": "has reduced capacity: drain and reset it",
    "drain_p2p": "requires that NVLink and P2P work ends",
    "bus_reset": "requires a reset of its PCIe bus: drain the node",
    "recover_imex_domain": "requires IMEX recovery: check nvidia-imex",
    "node_reboot": "requires a reboot: drain the node, then reboot",
    "system_reboot": "requires a system reboot: drain its nodes first",
    "row_remap_failure": "has bad memory: run the field diagnostic",
    "row_remap_pending": "needs a reset to replace bad memory rows",
    "ecc_uncorrected": "lost data to memory errors: check its jobs",
}
"""What is wrong with a GPU, and after a colon what to do, for a line of 80 bytes. By fault reason, recovery action, and
condition of `gpumap.model.check`. A fault reason is here only if it proves that the GPU is broken."""

XIDS: dict[int, str] = {
    8: "GPU stopped working for a program",
    11: "invalid command stream",
    13: "exception in a GPU program",
    31: "invalid memory access",
    32: "invalid command stream",
    43: "program stopped after its own error",
    44: "fault during a context switch",
    45: "cleanup after a program that ended",
    46: "GPU stopped working",
    48: "uncorrectable memory error",
    54: "power cable is not connected",
    62: "internal controller halted",
    63: "bad memory is marked for replacement",
    64: "bad memory could not be replaced",
    68: "video decoder error",
    69: "invalid command of a program",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "memory error in one program",
    95: "memory error in any program",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
    121: "corrected errors on the link to the CPU",
    136: "NVLink training failed",
    137: "invalid access over NVLink",
    140: "unrecovered memory error",
    142: "video encoder error",
    143: "GPU initialization failed",
    151: "key rotation failed",
    154: "recovery action changed",
    155: "NVLink went down",
    156: "a broken unit was retired",
    157: "a broken unit could not be retired",
    158: "GPU did not answer in time",
    171: "uncorrectable error in DRAM",
    172: "uncorrectable error in SRAM",
    **dict.fromkeys(range(144, 151), "NVLink error"),
}
"""What an XID code means, in few words. NVIDIA's catalog for Ampere and later has the rest:
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"""


def finding_remedy(kind: str, reason: str, index: int | None, pids: Sequence[int] = ()) -> str | None:
    """Return what to do about a finding with these PIDs; about one of the GPU with this NVML index."""
    if kind == "unmatched":
        return UNMATCHED.get(reason)
    remedy = (
        FINDINGS.get(reason)
        or FINDINGS.get(kind)
        or FAULTS.get(reason)
        or HEALTH.get(reason)
        or RECOVERY.get(reason.removeprefix("recovery_"))
        or {f"xid_{code}": text for code, text in FATAL_XIDS.items()}.get(reason)
    )
    if remedy and index is not None:
        remedy = remedy.replace("<index>", str(index))
    if not remedy or not pids:
        return remedy
    return remedy.replace("kill <PID>", f"kill {' '.join(map(str, pids))}").replace("<PID>", str(pids[0]))


def advice(remedy: str | None) -> str:
    """Return a remedy without its first sentence, which says what is wrong: for where that is already said."""
    return re.sub(r"^.*?\. (?=[A-Z])", "", remedy or "", count=1)


def capability_remedies(capabilities: Mapping[str, bool], gpu_answers: bool) -> dict[str, str]:
    """Return what to do about missing capabilities. Those of a GPU count only if a GPU answers."""
    missing = [name for name, present in capabilities.items() if not present and name in CAPABILITIES]
    return {name: CAPABILITIES[name] for name in missing if gpu_answers or name not in OF_GPUS}
