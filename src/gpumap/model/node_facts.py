"""Facts that `gpumap doctor` collects on the node itself, beyond the map. Frozen values, no logic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """What a source said when it was asked for facts: what was seen, or the reason and detail of its failure."""

    seen: str = ""
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Privileges:
    """What this process may do. `bare_host`: it runs in no container, where rights are its user's own."""

    uid: int
    capabilities: tuple[str, ...]
    api_token: str | None
    runtime_sockets: tuple[str, ...]
    bare_host: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that only this node's own files show, in addition to the document."""

    kubelet: Answer
    checkpoint: Answer
    pod_logs: Answer
    push: Answer
    privileges: Privileges
    gpu_fractioning: Answer | None = None
    """`None` without --gpu-fractioning-map."""
    pods_api: Answer | None = None
    """`None` without --pods-api-socket."""
