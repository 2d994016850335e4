"""The table of `gpumap map`: holders, users, what is not known, and names that would steer a terminal."""

from gpumap.document import document
from gpumap.snapshot import Snapshot
from gpumap.tables import map_table
from tests.nodes import Gpu, Pod, Process, TestNode, gpu_uuid

CARD = gpu_uuid(0)


def lines(snapshot: Snapshot, *, wide: bool = False) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in map_table(document(snapshot), wide=wide).splitlines()]


def line_of(snapshot: Snapshot, word: str) -> list[str]:
    """The words of the one line with `word` in it."""
    (found,) = [words for words in lines(snapshot) if word in words]
    return found


def test_holder_user_and_squatter() -> None:
    """A holder has what it was given and uses; a squatter has been given nothing; the rest is named by its owner."""
    holder, squatter = Pod("ml", "holder", {"main": {"nvidia.com/gpu": [str(CARD)]}}), Pod("ml", "squat", {"main": {}})
    node = TestNode([Gpu(0)], [holder, squatter])
    node.processes = [Process(10, CARD, holder, sm=0.5), Process(11, CARD, squatter), Process(12, CARD, None)]
    node.collect()
    snapshot = node.collect()
    assert line_of(snapshot, "holder") == ["ml", "holder", "main", "1", "1", "80.0GiB", "1.0GiB", "50%", "assigned"]
    assert line_of(snapshot, "squat") == ["ml", "squat", "main", "0", "0", "0", "1.0GiB", "0%", "UNASSIGNED"]
    assert line_of(snapshot, "host") == ["1.0GiB", "host"]
    assert line_of(snapshot, "unaccounted") == ["100MiB", "unaccounted"]


def test_what_is_not_known_is_a_dash_and_stands_once() -> None:
    """While the List is stale nobody is said to hold nothing, and no memory is listed a second time as unknown."""
    pod = Pod("ml", "job", {"main": {"nvidia.com/gpu": [str(CARD)]}})
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod, sm=0.5)])
    node.collect()
    node.down.add("kubelet")
    snapshot = node.collect(seconds=100)
    assert line_of(snapshot, "job") == ["ml", "job", "main", "-", "-", "-", "1.0GiB", "50%", "unknown"]
    assert not [words for words in lines(snapshot) if words[-1:] == ["unknown"] and "job" not in words]


def test_partitioned_gpu_that_was_given_out_whole() -> None:
    """Its holder is assigned on each leaf, and the GPU's own row knows which card it is."""
    gpu = Gpu(0, mig=[(1, 0, 3)])
    pod = Pod("ml", "whole", {"main": {"nvidia.com/gpu": [str(gpu.uuid)]}})
    snapshot = TestNode([gpu], [pod], [Process(10, gpu.leaves[0], pod)]).collect()
    rows = [words for words in lines(snapshot) if "whole" in words]
    assert sorted(words[3:] for words in rows) == [
        ["-", "-", "-", "1.0GiB", "-", "assigned"],
        ["1", "1", "80.0GiB", "-", "-", "assigned"],
    ]
    assert [device["index"] for device in document(snapshot)["devices"]] == [0, 0]


def test_names_do_not_steer_the_terminal() -> None:
    """Escapes, line breaks and direction marks from outside are shown as question marks, wherever they come from."""
    evil = "\x1b[31m\x1b]0;owned\x07\n\u202e"
    pod = Pod(evil, evil, {evil: {"nvidia.com/gpu": [evil]}})
    text = map_table(document(TestNode([Gpu(0)], [pod]).collect()), wide=True)
    assert "unparsed" in text
    assert all(character.isprintable() or character == "\n" for character in text)
