"""What to do about what is missing, broken or wasted: one sentence for each reason of a source, GPU, slot or finding.

The page, `doctor`, /api/v1/map and endpoints.md all say these words. Pure; a reason that is not here has none.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumap.model.terms import Source

OF_GPUS = ("process_utilization", "gpm", "xid_events")
"""Capabilities that depend on the GPUs."""

_BY_MOUNT = (
    "Where that is so, the runtime may refuse `NVIDIA_VISIBLE_DEVICES` from unprivileged containers (Bottlerocket, "
    "hardened clusters): ask for the GPUs by a mount, as docs/how-to/install says."
)
_LET_GO = "let gpumap go of the driver (`pkill -USR1 -x gpumap` on the node, or `--nvml-release`)"

SOURCES: dict[Source, dict[str, str]] = {
    Source.KUBELET: {
        "socket_missing": "Mount the kubelet's directory `pod-resources` (never the socket itself); where its root "
        "is elsewhere, set `kubelet.rootDir` or `--kubelet-root` (microk8s: "
        "`/var/snap/microk8s/common/var/lib/kubelet`, k0s: `/var/lib/k0s/kubelet`).",
        "connection_refused": "The kubelet is down or restarting; gpumap is back within two seconds of it. If it stays "
        "so: `systemctl status kubelet` on the node.",
        "permission_denied": "Run as user 0 (no capability is needed); where SELinux denies the connection, allow it.",
        "rate_limited": "Clients on this node ask the kubelet more than 100 times a second; find the other one.",
        "deadline_exceeded": "The kubelet hangs or is overloaded: look at its log and the node's load.",
        "message_too_large": "The answer is beyond 24 MiB (kubernetes/kubernetes#141335): update the kubelet.",
        "unimplemented": "This kubelet has no PodResources API: it takes Kubernetes 1.15 or later.",
        "unavailable": "The kubelet drops the connection: look at its log.",
        "decode": "What answers is no kubelet, or a newer one than gpumap knows: report it with `gpumap record`.",
        "duplicate_claims": "The kubelet lists the devices of a claim hundreds of times: once more at each retry of a "
        "preparation that fails (kubernetes/kubernetes#141335). gpumap counts each once. See why that pod does not "
        "start; update the kubelet before the answer is too large.",
        "odd_name": "The kubelet lists a name that no Kubernetes gives, or one that is not UTF-8. It is kept; what "
        "cannot be shown of it is spelled out, and a name of more than 4096 characters is cut.",
    },
    Source.NVML: {
        "library_not_found": "Bring the driver's library into the container: `runtimeClassName: nvidia`, or "
        f"`nvml.hostPath`; outside Kubernetes `--nvml-library`. {_BY_MOUNT}",
        "driver_not_loaded": "Load the driver on the node (`nvidia-smi` must work there); gpumap finds it without a "
        "restart.",
        "driver_version_mismatch": "Library and kernel module differ after an update of the driver. gpumap takes the "
        "new library where it is mounted from the host, and else ends: its next container has it. If it stays so, "
        "reboot the node.",
        "unknown": "NVML cannot be initialised. If it could before, the container may have lost its device nodes, as "
        "after `systemctl daemon-reload`: gpumap ends, and its next container has them. With NVIDIA's CDI they stay.",
        "no_permission": "Give the container the GPU's device nodes: `runtimeClassName: nvidia`, or NVIDIA's CDI. "
        f"{_BY_MOUNT}",
        "hung": "A driver call on a GPU does not return; other GPUs stay fresh. Look for Xid lines in `dmesg`, then "
        "reset the GPU or reboot the node.",
        "deadline_exceeded": "The driver as a whole does not answer: look for Xid lines in `dmesg`; mostly it takes a "
        "reboot.",
        "lost": "The GPU fell off the bus: look for Xid 79 in `dmesg`; it takes a reboot, and often new hardware. One "
        "that comes back is seen within a minute.",
        "reset_required": f"Drain the node, {_LET_GO}, then reset the GPU: `nvidia-smi --gpu-reset -i <index>`.",
        "worker_crashed": "The driver's library crashed gpumap's worker; the GPU that did it is asked less often. "
        "Report it to NVIDIA with the driver's version.",
        "worker_oom_killed": "The kernel killed gpumap's worker because gpumap's container reached its memory limit: "
        "raise the limit (`resources.limits.memory`).",
        "not_supported": "The driver refuses a value that it reported before. gpumap asks for it again, and until then "
        "the value is absent. If it stays so, report it to NVIDIA with the driver's version.",
        "worker_start": "gpumap cannot start its own worker process: look at the limits of memory and processes.",
        "protocol": "gpumap's worker talks nonsense: report it as gpumap's fault.",
    },
    Source.PROCFS: {
        "unreadable": "An entry of /proc may not be read: run as user 0, and without `hidepid` on the node's /proc.",
        "deadline_exceeded": "/proc does not answer: a process in the kernel's hands blocks it; look at `dmesg`.",
    },
    Source.POD_IDENTITY: {
        "checkpoint_missing": "Without names from here processes cannot be told apart by pod: mount the kubelet's "
        "directory `device-plugins` (`privileges.checkpoint=true`).",
        "checkpoint_corrupt": "The kubelet's device checkpoint is broken; it is written anew at the next allocation.",
        "checkpoint_unreadable": "The kubelet's device checkpoint may not be read (run as user 0), or is larger than "
        "24 MiB, or was mounted as a file, which the kubelet has replaced since: mount its directory.",
        "checkpoint_row": "Some rows of the kubelet's device checkpoint are not whole; the others are read.",
        "plugin_answer": "A device plugin's answer in the checkpoint cannot be read: the GPU behind its ids stays "
        "unknown, if they do not name it. Report it with `gpumap record --anonymize`.",
        "pod_logs_missing": "Names for processes come from the names in `/var/log/pods`: mount it "
        "(`privileges.podLogs=true`) or point `--pod-log-root` at it.",
        "pod_logs_unreadable": "The directories of pods' logs may not be read: run as user 0. Or they are more than "
        "16384: delete pods that have ended, or the directories that they left.",
        "pods_api_socket_missing": "This kubelet has no Pods API (it takes 1.37, or the gate `PodsAPI`), or its "
        "directory `pods-api` is not mounted (`privileges.podsApi=true`). Names come from the files.",
        "pods_api_connection_refused": "The kubelet is down or restarting; names come from the files until it is back.",
        "pods_api_failed_precondition": "The kubelet has started and not heard from its API server yet; names come "
        "from the files until then.",
        "pods_api_unimplemented": "What listens at `--pods-api-socket` has no Pods API; see that it is the right one.",
        "pods_api_permission_denied": "Run as user 0; where SELinux denies the connection, allow it.",
        "pods_api_stream_ended": "The kubelet ended the stream of its Pods API. It is asked again each second; names "
        "come from the files meanwhile.",
        "pods_api_decode": "What answers is no kubelet's Pods API: see `--pods-api-socket`.",
        "dra_state_unreadable": "The kubelet's `dra_manager_state` may not be read (run as user 0), or is larger "
        "than 24 MiB.",
        "dra_state_corrupt": "The kubelet's `dra_manager_state` is broken, or newer than gpumap knows: report it with "
        "`gpumap record`; UIDs come from the other files.",
        "dra_state_row": "Some claims of the kubelet's `dra_manager_state` are not whole; the others are read.",
        "dra_state_stale_mount": "The kubelet has replaced `dra_manager_state`, and what is mounted is the old one: "
        "mount its directory or nothing, never the file.",
        "dra_checkpoint_unreadable": "The `checkpoint.json` of NVIDIA's DRA driver may not be read (run as user "
        "0), or is larger than 24 MiB.",
        "dra_checkpoint_corrupt": "The `checkpoint.json` of NVIDIA's DRA driver is broken, or newer than gpumap knows: "
        "report it with `gpumap record`; devices are found by their names.",
        "dra_checkpoint_row": "Some devices in the `checkpoint.json` of NVIDIA's DRA driver are not whole; the others "
        "are read.",
        "dra_checkpoint_stale_mount": "NVIDIA's DRA driver has replaced its `checkpoint.json`, and what is mounted is "
        "the old one: mount its directory (`privileges.dra=true`).",
        "deadline_exceeded": "The disk with the kubelet's files does not answer: look at the node's disk.",
    },
}

FAULTS: dict[str, str] = {
    "lost": SOURCES[Source.NVML]["lost"],
    "reset_required": SOURCES[Source.NVML]["reset_required"],
    "insufficient_power": "The GPU's power cables are not connected, or not all of them: see to the hardware.",
    "irq_issue": "The kernel has no interrupt for this GPU: check the firmware's settings, then reboot.",
    "no_permission": SOURCES[Source.NVML]["no_permission"],
    "hung": SOURCES[Source.NVML]["hung"],
    "worker_crashed": SOURCES[Source.NVML]["worker_crashed"],
    "unknown": "NVML gives no reason: `nvidia-smi -q -i <index>` and `dmesg` on the node may say more.",
}
"""By fault reason of a GPU."""

RECOVERY: dict[str, str] = {
    "gpu_reset": f"The driver asks for a reset: end the GPU's work, {_LET_GO}, "
    "then `nvidia-smi --gpu-reset -i <index>`.",
    "drain_and_reset": "The GPU works at less than it has: what runs may end its work, nothing new should start. "
    f"Then {_LET_GO}, and `nvidia-smi --gpu-reset -i <index>`.",
    "drain_p2p": "The driver asks to end what moves data from GPU to GPU (NVLink, P2P); then it will say what else the "
    "GPU needs.",
    "bus_reset": "The driver asks for a reset of the GPU's PCIe bus: drain the node, and do it from the host.",
    "recover_imex_domain": "The driver asks to recover the IMEX domain, the nodes that share an NVLink fabric: see to "
    "`nvidia-imex` on all of them.",
    "node_reboot": "The driver asks for a reboot; a reset of the GPU is not enough: drain the node and reboot it.",
    "system_reboot": "The driver asks for a reboot of the whole system that the GPU is part of: drain its nodes first.",
}
"""By the recovery action that the driver asks for; `none` asks for nothing."""

UNMATCHED: dict[str, str] = {
    "unparsed": "gpumap does not read this plugin's ids: report them with `gpumap record --anonymize`; what its pods "
    "use is measured all the same.",
    "untrusted_id": "These ids do not name the GPU. The plugin's answer does: mount the kubelet's directory "
    "`device-plugins` (`privileges.checkpoint=true`). For MIG devices of NVIDIA's DRA driver: its own notes "
    "(`privileges.dra=true`). Where that is so, the plugin had no GPU to give.",
    "not_in_nvml": "Where the GPU was re-partitioned or removed, restart the device plugin and the pod; one that is "
    "passed through to a virtual machine is meant to be so.",
    "device_down": "See which GPU is down; when it answers, the slots find their device.",
    "nvml_down": "See to the driver first; when it answers, the slots find their device.",
}
"""By reason of slots that are on no device."""

FINDINGS: dict[str, str] = {
    "squatter": "Let the pod request a GPU, or end its processes on the node (`kill <PID>`).",
    "leftover": "The pod no longer exists: end its processes on the node (`kill <PID>`).",
    "over": "Request a larger share for the container, or limit its memory in the application (vLLM: "
    "`--gpu-memory-utilization`).",
    "idle": "Ask the pod's owner whether the pod still needs the GPU. If not, delete it or scale its workload to 0.",
    "unused": "If the peak stays low, request a smaller share or MIG device, or let several pods share the GPU.",
}
"""By kind of finding of `gpumap waste`. Slots on no device have the remedy of their reason."""

CAPABILITIES: dict[str, str] = {
    "pid_visibility": "No memory or SM time by container: gpumap's pod needs `hostPID: true` "
    "(`privileges.hostPID=true`).",
    "device_checkpoint": "Pod UIDs are not certain and init containers are not known: mount the kubelet's directory "
    "`device-plugins` (`privileges.checkpoint=true`).",
    "pod_logs": "Processes cannot always be named: mount `/var/log/pods` and `/var/log/containers` "
    "(`privileges.podLogs=true`).",
    "process_utilization": "No SM time by container: the driver keeps none on MIG devices, vGPU guests and WSL; "
    "memory is told all the same.",
    "gpm": "No activity of a device's SMs, tensor cores and memory: the driver measures it on Hopper and later, not in "
    "most vGPU guests; `--collect` may leave it out, and `--nvml-release` does.",
    "push": "New pods are seen at the next interval, not at once. Unless `--no-push` is meant: mount the kubelet's "
    "directory `device-plugins` (`privileges.checkpoint=true`). The log says what else may be in the way.",
    "xid_events": "No XID errors are counted: NVML does not answer, this driver or GPU tells none (WSL, vGPU guests), "
    "or `--nvml-release` or `--collect` leaves them out. `dmesg` has them.",
}
"""By capability that is 0."""

HEALTH: dict[str, str] = {
    "ecc_uncorrected": "Counted over the GPU's life; what they hit was lost then. Where the number grows, run NVIDIA's "
    "field diagnostic.",
    "row_remap_pending": "Rows of the GPU's memory wait to be replaced by spare ones: drain the node when it suits, "
    f"{_LET_GO}, and reset the GPU: `nvidia-smi --gpu-reset -i <index>`.",
    "row_remap_failure": "A row of the GPU's memory could not be replaced: run NVIDIA's field diagnostic; the GPU is "
    "mostly due for an exchange.",
    "xid_errors": "NVIDIA's catalog of XID errors says what a code means, `dmesg` on the node what happened. 13, 31, "
    "43, 45, 68 and 109 are mostly an application's own fault, others the GPU's.",
}
"""By what is wrong with a GPU that answers. The application's codes: health.go of NVIDIA's k8s-device-plugin."""

PUSH: dict[str, str] = {
    "directory_missing": CAPABILITIES["push"],
    "permission_denied": "The kubelet's directories may not be read: run as user 0.",
    "inotify_instances": "The node's programs have taken all inotify instances of their user: raise "
    "`fs.inotify.max_user_instances` on the node (128 is the kernel's default).",
    "inotify_watches": "The node's programs have taken all inotify watches of their user: raise "
    "`fs.inotify.max_user_watches` on the node.",
    "inotify_not_supported": "This kernel, or the sandbox that gpumap runs in, has no inotify.",
}
"""By the reason that the log gives with `push=0`."""


def of_fault(fault: str | None, index: int) -> str | None:
    """Return what to do about the fault of the GPU with this NVML index."""
    return _with_index(FAULTS.get(fault), index) if fault else None


def of_recovery_action(action: str, index: int) -> str | None:
    """Return what to do about the recovery action that the driver requests for this GPU."""
    return _with_index(RECOVERY.get(action), index)


def of_missing_capabilities(capabilities: Mapping[str, bool], gpu_answers: bool) -> dict[str, str]:
    """Return what to do about missing capabilities. Those of a GPU count only if a GPU answers."""
    missing = [name for name, present in capabilities.items() if not present and name in CAPABILITIES]
    return {name: CAPABILITIES[name] for name in missing if gpu_answers or name not in OF_GPUS}


def _with_index(remedy: str | None, index: int) -> str | None:
    return remedy.replace("<index>", str(index)) if remedy else None
