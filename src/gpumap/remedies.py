"""What to do about what is missing or broken: one sentence for each reason that a source, a GPU or a slot can have.

The page, `doctor`, /api/v1/map and docs/operations.md all say these words. Pure; a reason that is not here has none.
"""

from __future__ import annotations

from gpumap.model import Source

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
        "message_too_large": "The answer is beyond 64 MiB (kubernetes/kubernetes#141335): update the kubelet.",
        "unimplemented": "This kubelet has no PodResources API: it takes Kubernetes 1.15 or later.",
        "unavailable": "The kubelet drops the connection: look at its log.",
        "decode": "What answers is no kubelet, or a newer one than gpumap knows: report it with `gpumap record`.",
    },
    Source.NVML: {
        "library_not_found": "Bring the driver's library into the container: `runtimeClassName: nvidia`, or "
        "`nvml.hostPath`; outside Kubernetes `--nvml-library`.",
        "driver_not_loaded": "Load the driver on the node (`nvidia-smi` must work there); gpumap finds it without a "
        "restart.",
        "driver_version_mismatch": "Library and kernel module differ after a driver update: restart gpumap's pod, or "
        "reboot the node.",
        "no_permission": "Give the container the GPU's device nodes: `runtimeClassName: nvidia`, or NVIDIA's CDI.",
        "hung": "A driver call on a GPU does not return; other GPUs stay fresh. Look for Xid lines in `dmesg`, then "
        "reset the GPU or reboot the node.",
        "deadline_exceeded": "The driver as a whole does not answer: look for Xid lines in `dmesg`; mostly it takes a "
        "reboot.",
        "lost": "The GPU fell off the bus: look for Xid 79 in `dmesg`; it takes a reboot, and often new hardware.",
        "reset_required": "Drain the node and reset the GPU: `nvidia-smi --gpu-reset -i <index>`.",
        "worker_crashed": "The driver's library crashed gpumap's worker; the GPU that did it is asked less often. "
        "Report it to NVIDIA with the driver's version.",
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
        "checkpoint_unreadable": "The kubelet's device checkpoint may not be read: run as user 0.",
        "pod_logs_missing": "Names for processes come from the names in `/var/log/pods`: mount it "
        "(`privileges.podLogs=true`) or point `--pod-log-root` at it.",
        "pod_logs_unreadable": "The directories of pods' logs may not be read: run as user 0.",
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

UNMATCHED: dict[str, str] = {
    "unparsed": "gpumap does not read this plugin's ids: report them with `gpumap record --anonymize`; what its pods "
    "use is measured all the same.",
    "untrusted_id": "Nothing is wrong on the node: gpumap does not read this plugin's grants yet; what its pods use is "
    "measured all the same.",
    "not_in_nvml": "Where the GPU was re-partitioned or removed, restart the device plugin and the pod; one that is "
    "passed through to a virtual machine is meant to be so.",
    "device_down": "See which GPU is down; when it answers, the slots find their device.",
    "nvml_down": "See to the driver first; when it answers, the slots find their device.",
}
"""By reason of slots that are on no device."""

CAPABILITIES: dict[str, str] = {
    "pid_visibility": "No memory or SM time by container: gpumap's pod needs `hostPID: true` "
    "(`privileges.hostPID=true`).",
    "device_checkpoint": "Pod UIDs are not certain and init containers are not known: mount the kubelet's directory "
    "`device-plugins` (`privileges.checkpoint=true`).",
    "pod_logs": "Processes cannot always be named: mount `/var/log/pods` and `/var/log/containers` "
    "(`privileges.podLogs=true`).",
    "process_utilization": "No SM time by container: the driver keeps none on MIG devices, vGPU guests and WSL; "
    "memory is told all the same.",
    "gpm": "This version of gpumap does not ask for GPM metrics yet.",
    "push": "This version of gpumap polls at its interval; it does not start a collection by itself yet.",
    "xid_events": "This version of gpumap does not listen for XID errors yet: see `dmesg`.",
}
"""By capability that is 0."""
