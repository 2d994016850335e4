"""What is not known of nodes and devices, such as the holders of one, as sentences. What no source reports is not 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpumap.cli.parser import WORD_FIELDS, did_you_mean
from gpumap.cli.rows import NodeMaps
from gpumap.model.check import fault_of_gpu, gpu_name
from gpumap.model.devices import has_kubelet, sources_up
from gpumap.model.findings import faulty_gpus, findings_of_gpus
from gpumap.model.formatting import listed, printable, reason_sentences
from gpumap.model.gaps import gaps_of, invisible, unknown_of_devices
from gpumap.model.node import Node
from gpumap.model.remedies import advice
from gpumap.model.terms import FINDINGS

_SENTENCES_MAX, _BLIND_MAX = 20, 5
_JUDGE_BY = frozenset({"nvml", "kubelet", "pod_identity"})


# --- sentences about nodes --------------------------------------------------------------------------------------------


def few(sentences: Iterable[str], fleet: bool) -> Iterator[str]:
    """Return sentences; of a fleet at most as many as a screen holds."""
    all_of_them = list(sentences)
    yield from all_of_them[:_SENTENCES_MAX] if fleet else all_of_them
    if fleet and len(all_of_them) > _SENTENCES_MAX:
        yield f"and {len(all_of_them) - _SENTENCES_MAX} more like this"


def sentences_of_each(maps: NodeMaps, sentences: Callable[[Node], Iterable[str]]) -> Iterator[str]:
    """Return the sentences about each node; of a fleet each sentence once, with the names of its nodes."""
    if not maps.fleet:
        for node in maps.maps:
            yield from sentences(node)
        return
    yield from reason_sentences(
        (node.name, sentence) for node in maps.maps for sentence in dict.fromkeys(sentences(node))
    )


def is_blind(node_map: Node) -> bool:
    """Return whether neither the kubelet nor NVML answers: almost nothing is known of the node."""
    return not sources_up(node_map) & {"kubelet", "nvml"}


def blind(maps: NodeMaps) -> Iterator[str]:
    """Return a sentence for each node that is blind, or for a few of them."""
    nodes = [node for node in maps.maps if is_blind(node)]
    for node in nodes[:_BLIND_MAX]:
        why = "neither its kubelet nor NVML answers" if has_kubelet(node) else "NVML does not answer"
        yield f"node {node.name}: {node.stale or why}"
    if len(nodes) > _BLIND_MAX:
        yield f"and {len(nodes) - _BLIND_MAX} more like this"


def troubles(maps: NodeMaps) -> Iterator[str]:
    """Return what keeps the maps from being whole: troubles of nodes, and nodes without a map."""
    yield from few(sentences_of_each(maps, _troubles), maps.fleet)
    yield from few(maps.missing, maps.fleet)


def _troubles(node_map: Node) -> Iterator[str]:
    if node_map.stale:
        yield node_map.stale
    for fault in findings_of_gpus(node_map.findings):
        yield f"{fault_of_gpu(fault, node_map)}. {advice(fault.remedy)}".rstrip()
    for source in node_map.sources:
        if not source.up:
            why = f": {source.reason} ({source.detail})" if source.reason else ""
            yield f"{source.source} is down{why}"
    yield from unknown_of_devices(node_map)
    if not node_map.capabilities.get("pid_visibility"):
        yield invisible(node_map)


def gpus_to_repair(node_map: Node) -> Iterator[str]:
    """Return a hint for each GPU with a fault."""
    for gpu in dict.fromkeys(gpu_name(fault, node_map) for fault in faulty_gpus(node_map.findings)):
        yield f"{gpu} needs repair: see `gpumap doctor`."


def all_known(maps: NodeMaps) -> bool:
    """Return whether nothing can be hidden: all nodes, their sources and each device are known."""
    return not maps.missing and all(map(_all_known, maps.maps))


def _all_known(node_map: Node) -> bool:
    gaps = gaps_of(node_map)
    return (
        sources_up(node_map) >= (_JUDGE_BY if has_kubelet(node_map) else {"nvml"})
        and bool(node_map.capabilities.get("pid_visibility"))
        and not node_map.nameless_gpus
        and all(gpu.up for gpu in node_map.gpus)
        and not (gaps.nowhere or gaps.unheld or gaps.unused)
    )


def _hint(word: str, names: Iterable[str], maps: NodeMaps) -> str:
    """Return what a word without a match may mean: a name that is like it, a kind of finding, a GPU."""
    field, colon, value = word.rpartition(":")
    if number := re.fullmatch(r"gpu[-=]?(\d+)", word):
        return f"; did you mean gpu:{number[1]}?"
    if field == "gpu" and not maps.fleet:
        indexes = [str(gpu.index) for node in maps.maps for gpu in node.gpus]
        return f"; the node has GPU {listed(indexes, 16)}" if indexes else ""
    if field == "finding":
        return did_you_mean(word, [f"finding:{kind}" for kind in FINDINGS])
    return "" if colon and field not in WORD_FIELDS else did_you_mean(value, names)


def no_rows(maps: NodeMaps, namespace: str, words: Sequence[str]) -> str:
    """Return the sentence in the place of a table without a device. For words, it has a name that is like one."""
    if words:
        containers = (container for node in maps.maps for device in node.devices for container in device.containers)
        names = sorted({name for container in containers for name in container.name})
        hints = (_hint(word, names, maps) for word in words)
        hint = next(filter(None, hints), f". Try {' '.join(f'{field}:' for field in WORD_FIELDS)}")
        return printable(f"Nothing matches {' '.join(words)}{hint}")
    if namespace:
        known = "" if all_known(maps) else "known "
        return f"Namespace {printable(namespace)} has no {known}holder or user of a GPU."
    return "No current data." if any(node.stale for node in maps.maps) else "No devices."
