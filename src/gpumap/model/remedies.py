"""Remedies: what a user does about each reason of a source, GPU, slot, finding or capability.

The page, `doctor` and /api/v1/map show these texts; docs/how-to/troubleshoot.md has short ones. Other reasons have no
remedy. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumap.model.terms import Source

OF_GPUS = ("process_utilization", "gpm", "xid_events")
"""Capabilities that depend on the GPUs."""

_BY_MOUNT = (
    "If it already has them: the runtime may ignore `NVIDIA_VISIBLE_DEVICES` of unprivileged containers (Bottlerocket, "
    "hardened clusters). Request the GPUs by a mount instead (docs/how-to/install)."
)
_RELEASE = "make gpumap release the driver (`pkill -USR1 -x gpumap` on the node, or `--nvml-release`)"

SOURCES: dict[Source, dict[str, str]] = {
    Source.KUBELET: {
        "socket_missing": "Mount the kubelet's directory `pod-resources`, not the socket itself. If the kubelet has "
        "another root, set `kubelet.rootDir` or `--kubelet-root` (microk8s: "
        "`/var/snap/microk8s/common/var/lib/kubelet`, k0s: `/var/lib/k0s/kubelet`).",
        "connection_refused": "The kubelet is down or restarting. gpumap connects again within two seconds of its "
        "start. If it stays down, run `systemctl status kubelet` on the node.",
        "permission_denied": "Run as user 0, without capabilities. If SELinux denies the connection, allow it.",
        "rate_limited": "Clients on this node call the kubelet more than 100 times a second. Find the other client.",
        "deadline_exceeded": "The kubelet hangs or is overloaded. Check its log and the load of the node.",
        "message_too_large": "The answer is larger than 24 MiB (kubernetes/kubernetes#141335). Update the kubelet.",
        "unimplemented": "This kubelet has no PodResources API. Use Kubernetes 1.15 or later.",
        "unavailable": "The kubelet drops the connection. Check its log.",
        "decode": "The answer is not from a kubelet, or from a newer kubelet than gpumap supports. Report it with "
        "`gpumap record`.",
        "no_descriptors": "gpumap cannot open more files: its limit is reached (`ulimit -n`, `fs.file-max`). gpumap "
        "connects again when it can.",
        "no_threads": "gpumap cannot start more threads: its limit is reached (`ulimit -u`, the cgroup's `pids.max`, "
        "the kubelet's `podPidsLimit`). gpumap connects again when it can.",
        "duplicate_claims": "The kubelet lists the devices of a claim again at each failed preparation "
        "(kubernetes/kubernetes#141335). gpumap counts each device once. Find out why that pod does not start, and "
        "update the kubelet before its answer becomes too large.",
        "odd_name": "The kubelet lists a name that is not valid in Kubernetes, or not UTF-8. gpumap keeps it, escapes "
        "characters that are not printable, and cuts names of more than 4096 characters.",
        "pod_resources_socket_missing": "The scheduler's agent does not run on this node, does not serve the socket "
        "(koordlet: feature gate `PodResourcesProxy`), or its directory is not mounted. Mount the directory, not the "
        "socket. Until the agent answers, gpumap reports no squatter.",
        "pod_resources_connection_refused": "The scheduler's agent is down or restarting. gpumap serves its last "
        "answer until `--stale-after`, and reports no squatter until the agent answers.",
        "pod_resources_permission_denied": "Run as user 0. If SELinux denies the connection, allow it.",
        "pod_resources_deadline_exceeded": "The scheduler's agent hangs or is overloaded. Check its log.",
        "pod_resources_unimplemented": "The server at `--pod-resources-socket` has no PodResources API. Check the "
        "path.",
        "pod_resources_unknown": "The scheduler's agent cannot read the kubelet. Check its log.",
        "pod_resources_unavailable": "The scheduler's agent drops the connection. Check its log.",
        "pod_resources_decode": "The answer is not a List of PodResources. Check `--pod-resources-socket`.",
    },
    Source.NVML: {
        "library_not_found": "On a machine without Kubernetes, install the driver, or name its library with "
        "`--nvml-library`. In Kubernetes, provide the library in the container: set `runtimeClassName: nvidia` or "
        f"`nvml.hostPath`. {_BY_MOUNT}",
        "driver_not_loaded": "Load the driver on the node (`nvidia-smi` must work there). gpumap then finds it "
        "without a restart.",
        "driver_version_mismatch": "Library and kernel module differ after an update of the driver. If the library is "
        "mounted from the host, gpumap loads the new one. Otherwise gpumap exits, and its next container gets it. If "
        "the error remains, reboot the node.",
        "unknown": "NVML cannot be initialized. If it worked before, the container may have lost its device nodes, for "
        "example after `systemctl daemon-reload`. gpumap then exits, and its next container gets them. With NVIDIA's "
        "CDI, containers do not lose them.",
        "no_permission": "Add the GPU's device nodes to the container: use `runtimeClassName: nvidia` or NVIDIA's CDI. "
        f"{_BY_MOUNT}",
        "hung": "A driver call on a GPU does not return. Other GPUs are not affected. Look for Xid lines in `dmesg`, "
        "then reset the GPU or reboot the node.",
        "deadline_exceeded": "The whole driver does not answer. Look for Xid lines in `dmesg`. Usually only a reboot "
        "helps.",
        "lost": "The GPU fell off the bus. Look for Xid 79 in `dmesg`. It needs a reboot, and often new hardware. If "
        "it returns, gpumap finds it within a minute.",
        "reset_required": f"Drain the node, {_RELEASE}, then reset the GPU: `nvidia-smi --gpu-reset -i <index>`.",
        "worker_crashed": "The driver's library crashed gpumap's worker. gpumap reads the GPU that caused it less "
        "often. Report it to NVIDIA with the driver's version.",
        "worker_oom_killed": "The kernel killed gpumap's worker because gpumap's container reached its memory limit. "
        "Raise the limit (`resources.limits.memory`).",
        "not_supported": "The driver refuses a value that it reported before. The value is absent until the driver "
        "reports it again. If the error remains, report it to NVIDIA with the driver's version.",
        "worker_start": "gpumap cannot start its worker process. Check the limits of memory, processes and open files.",
        "protocol": "gpumap's worker sent an invalid message. Report it as a bug of gpumap.",
    },
    Source.PROCFS: {
        "unreadable": "gpumap may not read an entry of /proc. Run as user 0, without `hidepid` on the node's /proc.",
        "deadline_exceeded": "/proc does not answer because a process hangs in the kernel. Look at `dmesg`.",
    },
    Source.POD_IDENTITY: {
        "checkpoint_missing": "gpumap needs this file to find the pods of processes. Mount the kubelet's directory "
        "`device-plugins` (`privileges.checkpoint=true`). The kubelet writes the file when the node's first device "
        "plugin registers.",
        "checkpoint_corrupt": "The kubelet's device checkpoint is damaged. The kubelet writes it again at the next "
        "allocation.",
        "checkpoint_unreadable": "gpumap cannot read the kubelet's device checkpoint. Run as user 0, and mount its "
        "directory instead of the file, because the kubelet replaces the file. Its maximum size is 24 MiB.",
        "checkpoint_row": "Some rows of the kubelet's device checkpoint are incomplete. gpumap reads the others.",
        "plugin_answer": "gpumap cannot read a device plugin's answer in the checkpoint. The GPU stays unknown unless "
        "the device ids name it. Report it with `gpumap record --anonymize`.",
        "pod_logs_missing": "gpumap needs `/var/log/pods` to name the pods of processes. Mount it "
        "(`privileges.podLogs=true`) or set `--pod-log-root`.",
        "pod_logs_unreadable": "gpumap may not read the log directories of pods (run as user 0), or there are more "
        "than 16384 of them (delete ended pods, or the directories that they left).",
        "pods_api_socket_missing": "This kubelet has no Pods API (1.37 and later, or the gate `PodsAPI`), or its "
        "directory `pods-api` is not mounted (`privileges.podsApi=true`). gpumap takes names from files.",
        "pods_api_connection_refused": "The kubelet is down or restarting. Until it returns, gpumap takes names from "
        "files.",
        "pods_api_failed_precondition": "The kubelet has started, but does not know its pods from the API server yet. "
        "Until then, gpumap takes names from files.",
        "pods_api_unimplemented": "The server at `--pods-api-socket` has no Pods API. Check the path of the socket.",
        "pods_api_permission_denied": "Run as user 0. If SELinux denies the connection, allow it.",
        "pods_api_stream_ended": "The kubelet ended the stream of its Pods API. gpumap connects again each second, and "
        "takes names from files until then.",
        "pods_api_decode": "The answer is not from a kubelet's Pods API. Check `--pods-api-socket`.",
        "gpu_fractioning_missing": "KAI-Scheduler's fractiond does not run on this node (0.18 and later, "
        "`global.gpuSharingMode: NvFractions`), or its directory is not mounted (`privileges.gpuFractioning=true`). "
        "gpumap reports no squatter, because it cannot know who shares GPUs.",
        "gpu_fractioning_unreadable": "gpumap may not read a mapping file of fractiond (run as user 0), it is no plain "
        "file, or it is larger than 64 KiB. gpumap reads the others, and reports no squatter.",
        "gpu_fractioning_corrupt": "A mapping file of fractiond is damaged, or newer than gpumap supports. Report it "
        "with `gpumap record`. gpumap reads the others, and reports no squatter.",
        "dra_state_unreadable": "gpumap may not read the kubelet's `dra_manager_state` (run as user 0), or it is "
        "larger than 24 MiB.",
        "dra_state_corrupt": "The kubelet's `dra_manager_state` is damaged, or newer than gpumap supports. Report it "
        "with `gpumap record`. gpumap takes UIDs from the other files.",
        "dra_state_row": "Some claims of the kubelet's `dra_manager_state` are incomplete. gpumap reads the others.",
        "dra_state_stale_mount": "The kubelet has replaced `dra_manager_state`, and the mounted file is the old one. "
        "Mount its directory or nothing, not the file.",
        "dra_checkpoint_unreadable": "gpumap may not read the `checkpoint.json` of NVIDIA's DRA driver (run as user "
        "0), or it is larger than 24 MiB.",
        "dra_checkpoint_corrupt": "The `checkpoint.json` of NVIDIA's DRA driver is damaged, or newer than gpumap "
        "supports. Report it with `gpumap record`. gpumap finds devices by their names.",
        "dra_checkpoint_row": "Some devices in the `checkpoint.json` of NVIDIA's DRA driver are incomplete. gpumap "
        "reads the others.",
        "dra_checkpoint_stale_mount": "NVIDIA's DRA driver has replaced its `checkpoint.json`, and the mounted file "
        "is the old one. Mount its directory (`privileges.dra=true`).",
        "deadline_exceeded": "The disk with the kubelet's files does not answer. Check the disk of the node.",
    },
}

FAULTS: dict[str, str] = {
    "lost": SOURCES[Source.NVML]["lost"],
    "reset_required": SOURCES[Source.NVML]["reset_required"],
    "insufficient_power": "Not all power cables of the GPU are connected. Check the hardware.",
    "irq_issue": "The kernel has no interrupt for this GPU. Check the settings of the firmware, then reboot.",
    "no_permission": SOURCES[Source.NVML]["no_permission"],
    "hung": SOURCES[Source.NVML]["hung"],
    "worker_crashed": SOURCES[Source.NVML]["worker_crashed"],
    "unknown": "NVML gives no reason. `nvidia-smi -q -i <index>` and `dmesg` on the node may show it.",
}
"""By fault reason of a GPU, worst first."""

RECOVERY: dict[str, str] = {
    "gpu_reset": f"The driver requests a reset. End all work on the GPU, {_RELEASE}, "
    "then run `nvidia-smi --gpu-reset -i <index>`.",
    "drain_and_reset": "The GPU works with reduced capacity. Start no new work on it, and let running work finish. "
    f"Then {_RELEASE}, and run `nvidia-smi --gpu-reset -i <index>`.",
    "drain_p2p": "The driver requests that work with transfers between GPUs (NVLink, P2P) ends. Then it reports the "
    "next action.",
    "bus_reset": "The driver requests a reset of the GPU's PCIe bus. Drain the node, and reset the bus from the host.",
    "recover_imex_domain": "The driver requests recovery of the IMEX domain (the nodes that share an NVLink fabric). "
    "Check `nvidia-imex` on all of them.",
    "node_reboot": "The driver requests a reboot. A reset of the GPU is not enough. Drain the node and reboot it.",
    "system_reboot": "The driver requests a reboot of the whole system that contains the GPU. Drain its nodes first.",
}
"""By the recovery action that the driver requests."""

UNMATCHED: dict[str, str] = {
    "unparsed": "gpumap cannot parse the ids of this device plugin. Report them with `gpumap record --anonymize`. "
    "gpumap still measures the use of its pods.",
    "untrusted_id": "These ids do not name the GPU, but the plugin's answer does. Mount the kubelet's directory "
    "`device-plugins` (`privileges.checkpoint=true`). For MIG devices of NVIDIA's DRA driver, mount its checkpoint "
    "(`privileges.dra=true`). If it is already mounted, the plugin assigned no GPU.",
    "not_in_nvml": "If the GPU was re-partitioned or removed, restart the device plugin and the pod. A GPU that is "
    "passed through to a virtual machine is correct.",
    "device_down": "Find out which GPU has not reported its uuid or its minor number. When it does, gpumap finds the "
    "device of the slots.",
    "nvml_down": "Repair the driver first. When it answers, gpumap finds the device of the slots.",
}
"""By reason of slots that match no device."""

FINDINGS: dict[str, str] = {
    "squatter": "Add a GPU request to the pod, or end its processes on the node (`kill <PID>`).",
    "leftover": "The pod no longer exists. End its processes on the node (`kill <PID>`).",
    "over": "Request a larger share for the container, or limit its memory in the application (vLLM: "
    "`--gpu-memory-utilization`).",
    "stalled": "It may wait for a peer that has failed. Look at its log, its stack (`py-spy dump --pid <PID>`) and "
    "NCCL's flight recorder.",
    "idle": "Ask the pod's owner whether the pod still needs the GPU. If not, delete it or scale its workload to 0.",
    "unused": "If the peak stays low, request a smaller share or MIG device, or let several pods share the GPU.",
}
"""By kind of finding. Faults and unmatched slots have the remedy of their reason."""

CAPABILITIES: dict[str, str] = {
    "pid_visibility": "No memory or SM time of containers. Set `hostPID: true` for gpumap's pod "
    "(`privileges.hostPID=true`), or run its Docker container with `--pid=host`.",
    "device_checkpoint": "Pod UIDs are not certain, and gpumap does not see init containers. Mount the kubelet's "
    "directory `device-plugins` (`privileges.checkpoint=true`). The kubelet writes the file when the node's first "
    "device plugin registers.",
    "pod_logs": "gpumap cannot name the pods of all processes. Mount `/var/log/pods` and `/var/log/containers` "
    "(`privileges.podLogs=true`).",
    "process_utilization": "No SM time of containers. The driver does not report it on MIG devices, vGPU guests and "
    "WSL. It still reports memory.",
    "gpm": "No activity of SMs, tensor cores and memory. The driver measures it on Hopper and later, except in most "
    "vGPU guests. `--nvml-release`, or `--collect` without gpm, turns it off.",
    "push": "gpumap sees new pods only at the next interval. Mount the kubelet's directory `device-plugins` "
    "(`privileges.checkpoint=true`), and do not set `--no-push`. gpumap's log shows other reasons.",
    "xid_events": "gpumap counts no XID errors. NVML does not answer, or the driver or GPU does not report them (WSL, "
    "vGPU guests), or `--nvml-release` or `--collect` turns them off. See `dmesg` for them.",
}
"""By capability that is 0."""

HEALTH: dict[str, str] = {
    "ecc_uncorrected": "The driver counts these errors over the GPU's life. Each one lost data. If the number grows, "
    "run NVIDIA's field diagnostic.",
    "row_remap_pending": "The GPU replaces bad rows of its memory at its next reset. When it suits, drain the node, "
    f"{_RELEASE}, and run `nvidia-smi --gpu-reset -i <index>`.",
    "row_remap_failure": "The GPU could not replace a bad row of its memory. Run NVIDIA's field diagnostic. Usually "
    "the GPU must be exchanged.",
    "xid_errors": "NVIDIA's catalog of XID errors explains the codes, and `dmesg` on the node shows the event. "
    "Usually an application causes 13, 31, 43, 45, 68 and 109, and the GPU causes other codes.",
}
"""By what is wrong with a GPU that answers. The application's codes: health.go of NVIDIA's k8s-device-plugin."""

IN_SHORT: dict[str, str] = {
    "lost": "fell off the bus: reboot the node",
    "reset_required": "requires a reset: drain the node, then reset it",
    "insufficient_power": "lacks power: check its power cables",
    "irq_issue": "has no interrupt: check the firmware, then reboot",
    "hung": "hangs: reset it or reboot the node",
    "gpu_reset": "requires a reset: end its work, then reset it",
    "drain_and_reset": "has reduced capacity: drain and reset it",
    "drain_p2p": "requires that NVLink and P2P work ends",
    "bus_reset": "requires a reset of its PCIe bus: drain the node",
    "recover_imex_domain": "requires IMEX recovery: check nvidia-imex",
    "node_reboot": "requires a reboot: drain the node, then reboot",
    "system_reboot": "requires a reboot of the whole system",
    "row_remap_failure": "has bad memory: run the field diagnostic",
    "row_remap_pending": "needs a reset to replace bad memory rows",
    "ecc_uncorrected": "lost data to memory errors: check its jobs",
}
"""What is wrong with a GPU and what to do, for a line of 80 bytes. By fault reason, recovery action, and condition of
`gpumap.model.check`. A fault reason is here only if it proves that the GPU is broken."""

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

PUSH: dict[str, str] = {
    "directory_missing": CAPABILITIES["push"],
    "permission_denied": "gpumap may not read the kubelet's directories. Run as user 0.",
    "inotify_instances": "The programs of this node use all inotify instances of their user. Raise "
    "`fs.inotify.max_user_instances` on the node (the kernel's default is 128).",
    "inotify_watches": "The programs of this node use all inotify watches of their user. Raise "
    "`fs.inotify.max_user_watches` on the node.",
    "inotify_not_supported": "This kernel, or the sandbox of gpumap, has no inotify.",
}
"""By the reason that the log gives with `push=0`."""


def of_fault(fault: str | None, index: int) -> str | None:
    """Return what to do about the fault of the GPU with this NVML index."""
    return _with_index(FAULTS.get(fault), index) if fault else None


def of_recovery_action(action: str | None, index: int) -> str | None:
    """Return what to do about the recovery action that the driver requests for this GPU."""
    return _with_index(RECOVERY.get(action), index) if action else None


def of_health(problem: str, index: int) -> str | None:
    """Return what to do about a problem of a GPU that answers."""
    return _with_index(HEALTH[problem], index)


def of_finding(kind: str, reason: str, index: int | None) -> str | None:
    """Return what to do about a finding; about a fault of the GPU with this NVML index."""
    if kind != "fault":
        return UNMATCHED.get(reason) if kind == "unmatched" else FINDINGS[kind]
    health = HEALTH.get("xid_errors" if reason.startswith("xid_") else reason)
    remedy = FAULTS.get(reason) or health or RECOVERY.get(reason.removeprefix("recovery_"))
    return remedy if index is None else _with_index(remedy, index)


def of_missing_capabilities(capabilities: Mapping[str, bool], gpu_answers: bool) -> dict[str, str]:
    """Return what to do about missing capabilities. Those of a GPU count only if a GPU answers."""
    missing = [name for name, present in capabilities.items() if not present and name in CAPABILITIES]
    return {name: CAPABILITIES[name] for name in missing if gpu_answers or name not in OF_GPUS}


def _with_index(remedy: str | None, index: int) -> str | None:
    return remedy.replace("<index>", str(index)) if remedy else None
