"""What `gpumap doctor` says of each GPU that is down or ill, and of what GPUs and their driver can tell. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpumap.cli.doctor.checks import Check
from gpumap.model.document import Document
from gpumap.model.units import counted

_NAMED = 3


def gpu_checks(document: Document) -> Iterator[Check]:
    """A line for each thing that is wrong with a GPU; none for one that is well."""
    for gpu in document.get("nameless_gpus", ()):
        why = f"{gpu['fault']}, and has not told its uuid since gpumap's start"
        yield Check(f"gpu/{gpu['index']}", "failed", False, "", why, gpu.get("remedy"))
    for gpu in document["gpus"]:
        seen = " ".join(str(part) for part in (gpu["uuid"], gpu["pci_bus_id"], gpu["model"]) if part)
        if not gpu["up"]:
            stuck = f" for {gpu['stuck_seconds']:.0f} s" if gpu["stuck_seconds"] else ""
            yield Check(f"gpu/{gpu['index']}", "failed", False, seen, f"{gpu['fault']}{stuck}", gpu.get("remedy"))
        yield from _illness(gpu, seen, document)


def _illness(gpu: Document, seen: str, document: Document) -> Iterator[Check]:
    """What the driver asks for, memory errors, and XID errors. An older agent's document has none of these."""
    name, known = f"gpu/{gpu['index']}", gpu.get("remedies") or {}
    recovery = gpu.get("recovery_action") or {}
    if recovery.get("action") not in (None, "none"):
        why = f"the driver asks for it: {recovery['action']}"
        yield Check(f"{name}/recovery_action", "degraded", False, seen, why, recovery["remedy"])
    if gpu.get("row_remap_failure"):
        why, remedy = "a row of its memory could not be replaced", known.get("row_remap_failure")
        yield Check(f"{name}/row_remap_failure", "failed", False, seen, why, remedy)
    if gpu.get("row_remap_pending"):
        why, remedy = "rows of its memory wait to be replaced", known.get("row_remap_pending")
        yield Check(f"{name}/row_remap_pending", "degraded", False, seen, why, remedy)
    lost = [one for one in gpu.get("ecc_errors", ()) if one["type"] == "uncorrected" and one["errors"]]
    if lost:
        where = ", ".join(f"{one['location']} {one['errors']}" for one in lost)
        errors = counted(sum(one["errors"] for one in lost), "memory error")
        why = f"{errors} over its life could not be corrected: {where}"
        yield Check(f"{name}/ecc_uncorrected", "warning", False, seen, why, known.get("ecc_uncorrected"))
    counts = (gpu.get("xids") or {}).get("counts")
    if counts:
        why = "XID " + ", ".join(f"{one['xid']} ({one['errors']}×)" for one in counts)
        hit = _hit(gpu, document)
        why += f", while {hit} held or used it" if hit else ""
        yield Check(f"{name}/xid", "warning", False, seen, why, known.get("xid_errors"))


def _hit(gpu: Document, document: Document) -> str:
    """The pods that held or used a GPU, or a part of it, when an XID error came."""
    parts = {gpu["uuid"], *(one["uuid"] for one in document["devices"] if one["gpu_uuid"] == gpu["uuid"])}
    rows = [row for row in document.get("container_xids", ()) if row["uuid"] in parts]
    pods = sorted({f"{row['namespace']}/{row['pod']}" for row in rows})
    more = f" and {len(pods) - _NAMED} more" if len(pods) > _NAMED else ""
    return ", ".join(pods[:_NAMED]) + more


def gpu_capabilities(document: Document) -> Iterator[Check]:
    """What GPUs and their driver tell, or do not."""
    readable = [gpu for gpu in document["gpus"] if gpu["up"]]
    if document["capabilities"].get("process_utilization") or readable:
        yield _process_utilization(document, readable)
    else:
        yield _nothing_answers("process_utilization")
    for name, group, judge in (("gpm", "gpm", _gpm), ("xid_events", "health", _xid_events)):
        collect = document.get("collect")
        if document["capabilities"].get(name):
            yield judge(document)
        elif collect is not None and group not in collect:
            yield Check(name, "not needed", False, "", f"--collect leaves out the group {group}")
        else:
            yield judge(document) if readable else _nothing_answers(name)


def _nothing_answers(name: str) -> Check:
    return Check(name, "unknown", False, "", "no GPU answers")


def _process_utilization(document: Document, readable: list[Document]) -> Check:
    name = "process_utilization"
    whole = sum(not gpu["partitioned"] for gpu in readable)
    if document["capabilities"].get(name):
        are = "is" if whole == 1 else "are"
        return Check(name, "ok", False, f"SM time by process, on {counted(whole, 'GPU')} that {are} not partitioned")
    if not whole:
        return Check(
            name, "not needed", False, "", "every GPU is partitioned, and no driver tells SM time on MIG devices"
        )
    return Check(name, "missing", False, "", "the driver keeps no SM time by process", _remedy(document, name))


def _gpm(document: Document) -> Check:
    """GPUs of before Hopper have none: that is nothing to mend, and a document does not tell how old a GPU is."""
    if document["capabilities"].get("gpm"):
        telling = sum(device.get("activity") is not None for device in document["devices"])
        return Check("gpm", "ok", False, f"activity of SMs, tensor cores and memory, on {counted(telling, 'device')}")
    why = "no GPU here tells the activity of its engines: that takes Hopper or later, and no --nvml-release"
    return Check("gpm", "not needed", False, "", why, _remedy(document, "gpm"))


def _xid_events(document: Document) -> Check:
    if document["capabilities"].get("xid_events"):
        listened = sum(gpu.get("xids") is not None for gpu in document["gpus"])
        return Check("xid_events", "ok", False, f"listened for on {counted(listened, 'GPU')}")
    why = "nobody listens: the driver does not let it (WSL, vGPU guests), or gpumap lets go of it (--nvml-release)"
    return Check("xid_events", "missing", False, "", why, _remedy(document, "xid_events"))


def _remedy(document: Document, name: str) -> str | None:
    return (document.get("remedies") or {}).get(name)
