"""What must hold for every page and snapshot, whatever the sources said: the grammar, and laws that need no truth.

promtool reads pages by the same grammar; `tests.fuzz.test_short` compares the two on pages of mutated captures.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict

from gpumap.model.observations import ContainerName, KubeletAnswer
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner
from tests.test_laws import one_series_each

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
_LABELS = rf"\{{(?:{_LABEL}(?:,{_LABEL})*)?\}}"
_NUMBER = r"[+-]?(?:Inf|[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)|NaN"
_SAMPLE = re.compile(rf"({_NAME})({_LABELS})? ({_NUMBER})")
_HEAD = re.compile(rf"# (HELP|TYPE) ({_NAME}) (.*)")
_TYPES = frozenset({"counter", "gauge", "unknown", "info", "untyped", "summary"})
_SUFFIXES = {"counter": ("", "_total"), "summary": ("", "_sum", "_count")}
_MAY_EXCEED_ONE = frozenset({"gpumap_gpu_fan_speed_ratio"})


def check_page(page: bytes, *, openmetrics: bool = False) -> dict[str, float]:
    """Assert that Prometheus accepts the page. Return its samples, by the text before the number."""
    text = page.decode()
    assert text == "" or text.endswith("\n"), "the last line has no end"
    heads: Counter[tuple[str, str]] = Counter()
    samples: dict[str, float] = {}
    family, kind, closed = "", "", set[str]()
    lines = text.split("\n")[:-1]
    if openmetrics:
        assert lines.pop() == "# EOF", "OpenMetrics ends with # EOF"
    for line in lines:
        if line.startswith("#"):
            head = _HEAD.fullmatch(line)
            assert head is not None, f"a bad head: {line[:300]!r}"
            heads[head[1], head[2]] += 1
            if head[1] == "TYPE":
                assert head[3] in _TYPES, line
                kind = head[3]
            if head[2] != family:
                closed.add(family)
                family = head[2]
                assert family not in closed, f"{family} is there twice"
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample is not None, f"a bad sample: {line[:300]!r}"
        names = [family + suffix for suffix in _SUFFIXES.get(kind, ("",))]
        assert sample[1] in names, f"{sample[1]} under {family}"
        key = sample[1] + (sample[2] or "")
        assert key not in samples, f"twice: {key[:300]}"
        value = samples[key] = float(sample[3])
        assert not math.isnan(value), f"not a number: {line[:300]}"
        assert not sample[1].startswith("gpumap_") or math.isfinite(value), f"not finite: {line[:300]}"
    assert all(number == 1 for number in heads.values()), "two heads of one family"
    return samples


def check_values(samples: dict[str, float]) -> None:
    """Assert that no value is impossible: a counter below 0, or a ratio of a container beyond 1."""
    for key, value in samples.items():
        name = key.partition("{")[0]
        if name.startswith("gpumap_") and name.endswith("_total"):
            assert value >= 0, f"a counter below 0: {key} {value}"
        if name.startswith("gpumap_container_") and name.endswith("_ratio"):
            assert 0 <= value <= 1, f"{key} {value}"


def check_snapshot(snapshot: Snapshot, answer: KubeletAnswer | None) -> None:
    """Assert the laws that need no truth. `answer` is the kubelet's, read in this collection."""
    one_series_each(snapshot)
    gpu_of = {leaf.uuid: leaf.gpu_uuid for leaf in snapshot.node.devices if leaf.gpu_uuid}
    shares: dict[str, float] = defaultdict(float)
    for row in snapshot.containers:
        shares[gpu_of.get(row.uuid, row.uuid)] += row.allocated_gpus or 0.0
        assert not row.holds or answer is not None or snapshot.expires is not None, "L6: a holder without a List"
    assert all(share <= 1 + 1e-9 for share in shares.values()), f"L9: {dict(shares)}"
    for leaf in snapshot.node.devices:
        if leaf.memory is not None and leaf.owners:
            assert sum(one.memory_bytes or 0 for one in leaf.owners) == leaf.memory.used_bytes, "L1"
        if answer is None:
            owners = {one.owner for one in leaf.owners}
            assert not owners & {Owner.UNASSIGNED, Owner.GONE}, "L6: an accusation without a List"
    if answer is not None:
        _check_nothing_is_lost(snapshot, answer)


def _check_nothing_is_lost(snapshot: Snapshot, answer: KubeletAnswer) -> None:
    """L5: each id of a resource of GPUs is on a leaf, or unmatched."""
    from tests.nodes import RULES

    told: Counter[tuple[ContainerName, str]] = Counter()
    for row in snapshot.containers:
        for resource, slots in row.slots.items():
            told[row.name, resource] += slots
    for one in snapshot.node.unmatched:
        told[one.name, one.resource] += one.slots
    for pod in answer.pods:
        for container in pod.containers:
            name = ContainerName(pod.namespace, pod.name, container.name)
            for devices in container.devices:
                if RULES.is_gpu_resource(devices.resource):
                    assert told[name, devices.resource] >= len(devices.ids), f"L5: {name} {devices}"
