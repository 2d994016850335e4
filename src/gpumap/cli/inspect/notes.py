"""What a table of `gpumap inspect` cannot say in its form: what is not known, of which nodes; what marks mean. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpumap.cli.inspect.cards import GPU_MEM
from gpumap.cli.inspect.grants import Grants, NodeGrants
from gpumap.cli.node_documents import Seen
from gpumap.cli.tables.document import few, invisible, name_of, sources_up
from gpumap.cli.tables.unknowns import untold
from gpumap.cli.words import by_reason
from gpumap.model.document import Document

NOT_KNOWN = "- is not known, and >= so much at least: a GPU that is shared in time grants no memory of its own"


def notes(seen: Seen, found: Grants, *, used: bool) -> list[str]:
    """What is missing, a sentence each; of many nodes each sentence once, with their names. `found` is what was counted
    of what was seen."""
    many = seen.fleet or len(seen.documents) > 1
    told = [
        (name_of(document), sentence)
        for document in seen.documents
        for sentence in dict.fromkeys(_of_node(document, used=used))
    ]
    told += [(node.name, sentence) for node in found.nodes for sentence in _moved(node)]
    said = list(few(by_reason(told), fleet=True)) if many else [sentence for _, sentence in told]
    if not found.nodes:
        said.append("no GPU was seen")
    return [*seen.missing, *said, *([] if _is_known(found, used=used) else [NOT_KNOWN])]


def _of_node(document: Document, *, used: bool) -> Iterator[str]:
    if document.get("stale"):
        yield document["stale"]
        return
    up = sources_up(document)
    if "nvml" not in up:
        yield "NVML does not answer: whose a GPU is, is not known; what is held stands under PENDING"
    if "kubelet" not in up:
        yield "the kubelet does not answer: who holds what may be old, or is not known"
    yield from untold(document, use=used)
    for gpu in document["gpus"]:
        if not gpu["up"]:
            yield f"GPU {gpu['index']} is down: {gpu['fault']}"
    for gpu in document["nameless_gpus"]:
        yield f"GPU {gpu['index']} is down, and has not told what it is: {gpu['fault']}"
    for resource, reason in sorted({(row["resource"], row["reason"]) for row in document["unmatched"]}):
        if resource != GPU_MEM:
            yield f"slots of {resource} are on no GPU that is known ({reason}), and not in the table"
    if used and "nvml" in up and not document["capabilities"].get("pid_visibility"):
        yield f"what pods use is not known. {invisible(document)}"


def _moved(node: NodeGrants) -> Iterator[str]:
    for place, index in node.moved.items():
        uuid = next(card.uuid for card in node.cards if card.index == place)
        yield f"GPU {uuid} has index {index}, as another one has: it stands at {place} (are two nodes called the same?)"


def _is_known(found: Grants, *, used: bool) -> bool:
    """Whether the table has every number."""
    amounts = [one for node in found.nodes for one in (node.allocated, node.total, *([node.used] if used else []))]
    shares = [share for node in found.nodes for pod in node.pods for share in pod.shares]
    amounts += [share.allocated for share in shares if share.held or used]
    amounts += [share.used for share in shares if used and share.index is not None]
    return all(one.whole for one in amounts)
