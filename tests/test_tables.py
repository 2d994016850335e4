"""The table of `gpumap map` and what all tables share: alignment, narrow terminals, colours, order, and odd names."""

import unicodedata

import pytest

from gpumap.agent.published import published
from gpumap.cli.commands import map as map_columns
from gpumap.cli.commands import top as top_columns
from gpumap.cli.commands import waste as waste_columns
from gpumap.cli.filter import select_rows
from gpumap.cli.rows import NodeMaps, rows
from gpumap.cli.table import Shape
from gpumap.cli.terminal import Screen, cells, contained, shortened, wrapped
from gpumap.model.formatting import age, printable
from gpumap.model.node import Grant, Node
from gpumap.model.snapshot import Snapshot
from tests.filter_cases import CASES, filter_node
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.shown import changed, map_table, top_table, top_values, waste_table, with_devices
from tests.snapshots import busy_node, empty_node

CARD = gpu_uuid(0)
TABLES = (map_table, top_table, waste_table)
ODD = {
    "longest": "x" * 253,
    "right to left": "שלום-عالم",
    "bidi controls": "a\u202eb\u2066c\u200fd",
    "zero width": "a\u200bb\u200dc\ufeffd\u00ade",
    "HTML": "<script>alert(1)</script>&amp;",
    "line breaks": "a\nb\rc\x85d\u2028e\x0bf",
    "escapes": "\x1b[31m\x1b]0;owned\x07\x9b2J\x1bP",
    "tabs and blanks": "a\tb\u00a0c\u3000d",
    "East Asian": "学習用のポッド",
    "combining": "e\u0301\u0301a\u0308",
    "unassigned and private": "\ue000\U000f0000\ud7ff",
}


def words(document: Node, shape: Shape | None = None) -> list[list[str]]:
    """The words of each line of the map."""
    return [line.split() for line in map_table(document, shape or Shape()).splitlines()]


def line_of(snapshot: Snapshot, word: str) -> list[str]:
    """The words of the one line with `word` in it, apart from the line of its device."""
    (found,) = [line for line in words(published(snapshot)) if word in line and "free" not in line]
    return found


def node_of(*names: str) -> Node:
    """Pods of these names on one GPU, each with a process, the first the largest."""
    pods = [Pod("ml", name, {"main": {"nvidia.com/gpu.shared": [f"{CARD}::{n}"]}}) for n, name in enumerate(names)]
    node = TestNode([Gpu(0)], pods)
    node.processes = [
        Process(10 + n, CARD, pod, memory=(9 - n) * GIB, sm=n / 10, comm=pod.name[:15]) for n, pod in enumerate(pods)
    ]
    node.collect()
    return published(node.collect())


# --- the map ----------------------------------------------------------------------------------------------------------


def test_holder_user_and_squatter() -> None:
    """A holder has what it was given and uses; a squatter has been given nothing; the rest is named by its owner."""
    holder, squatter = Pod("ml", "holder", {"main": {"nvidia.com/gpu": [str(CARD)]}}), Pod("ml", "squat", {"main": {}})
    node = TestNode([Gpu(0)], [holder, squatter])
    node.processes = [Process(10, CARD, holder, sm=0.5), Process(11, CARD, squatter), Process(12, CARD, None)]
    node.collect()
    snapshot = node.collect()
    assert line_of(snapshot, "holder") == ["ml", "holder", "main", "1", "1", "80.0GiB", "1.0GiB", "50%", "assigned"]
    assert line_of(snapshot, "squat") == ["ml", "squat", "main", "0", "0", "0", "1.0GiB", "0%", "unassigned"]
    assert line_of(snapshot, "host") == ["1.0GiB", "0%", "host"]
    node.pods.remove(squatter)
    node.collect()
    assert line_of(node.collect(), "gone") == ["ml", "squat", "1.0GiB", "0%", "gone"]
    assert "unaccounted" not in map_table(published(snapshot), Shape())


@pytest.mark.parametrize(
    ("total_gib", "remainder_mib", "is_row"),
    [(80, 511, False), (80, -511, False), (80, 512, True), (80, -512, True), (8, 81, False), (8, 82, True)],
)
def test_small_remainder_is_part_of_the_line_of_its_device(total_gib: int, remainder_mib: int, is_row: bool) -> None:
    """Memory without a process has no row below 512 MiB and 1 % of the device. JSON and -o wide keep it."""
    holder = Pod("ml", "holder", {"main": {"nvidia.com/gpu": [str(CARD)]}})
    node = TestNode([Gpu(0, total=total_gib * GIB, overhead=remainder_mib << 20)], [holder])
    node.processes = [Process(10, CARD, holder, memory=2 * GIB)]
    found = published(node.collect())
    for show in (map_table, top_table):
        assert ("unaccounted" in show(found, Shape())) == is_row
        assert ("unaccounted" in show(found, Shape(processes=True))) == is_row
        assert "unaccounted" in show(found, Shape(wide=True))
    assert [row["owner"] for row in top_values(found, Shape())["rows"]].count("unaccounted") == 1


def test_slots_of_several_resources_are_not_added_up() -> None:
    """They are of different units: cores and blocks of memory; each number stands for itself, in their order."""
    found = node_of("vcuda")
    grant = Grant({"tencent.com/vcuda-core": 40, "tencent.com/vcuda-memory": 64})
    found = with_devices(
        found, lambda device: changed(device, containers=tuple(changed(one, grant=grant) for one in device.containers))
    )
    assert "40+64" in map_table(found, Shape()).split()


def test_unknown_values_are_dashes_and_are_shown_once() -> None:
    """While the List is stale, no device is shown as free, and no memory is listed a second time as unknown."""
    pod = Pod("ml", "job", {"main": {"nvidia.com/gpu": [str(CARD)]}})
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod, sm=0.5)])
    node.collect()
    node.down.add("kubelet")
    snapshot = node.collect(seconds=100)
    assert line_of(snapshot, "job") == ["ml", "job", "main", "-", "-", "-", "1.0GiB", "50%", "unknown"]
    assert not [line for line in words(published(snapshot)) if line[-1:] == ["unknown"] and "job" not in line]


def test_partitioned_gpu_that_was_given_out_whole() -> None:
    """Its holder is assigned on each leaf, and the GPU's own row knows which card it is."""
    gpu = Gpu(0, mig=[(1, 0, 3), (2, 0, 3)])
    pod = Pod("ml", "whole", {"main": {"nvidia.com/gpu": [str(gpu.uuid)]}})
    snapshot = TestNode([gpu], [pod], [Process(10, gpu.leaves[0], pod)]).collect()
    rows = [line for line in words(published(snapshot)) if line[1:2] == ["whole"]]
    assert sorted(line[3:] for line in rows) == [
        ["-", "-", "-", "0", "-", "assigned"],
        ["-", "-", "-", "1.0GiB", "-", "assigned"],
        ["1", "1", "80.0GiB", "-", "-", "assigned"],
    ]
    assert [device.index for device in published(snapshot).devices] == [0, 0, 0]


@pytest.mark.parametrize(
    ("order", "reverse", "pods"),
    [
        ("", False, ["a", "b", "c"]),
        ("namespace", True, ["c", "b", "a"]),
        ("memory", False, ["b", "a", "c"]),
        ("memory", True, ["c", "a", "b"]),
        ("sm", False, ["c", "a", "b"]),
    ],
)
def test_containers_are_sorted_below_their_device(order: str, reverse: bool, pods: list[str]) -> None:
    """Numbers come largest first, names from A to Z, and the other way round where that is asked for."""
    found = node_of("b", "a", "c")
    lines = words(found, Shape(order=order, reverse=reverse))
    assert [line[1] for line in lines if line[:1] == ["ml"]] == pods
    assert lines[1][0] == "0"


def test_every_order_is_one_that_works() -> None:
    """Each column that --sort-by offers sorts every table, also one that knows nothing."""
    orders = {map_table: map_columns.ORDERS, top_table: top_columns.ORDERS, waste_table: waste_columns.ORDERS}
    for snapshot in (busy_node(3), empty_node()):
        for table, known in orders.items():
            lines = [table(published(snapshot), Shape(order=order)).splitlines() for order in known]
            assert {len(table_lines) for table_lines in lines} == {len(lines[0])}


def test_every_order_is_that_of_a_column() -> None:
    """What --help lists without importing a table is what the columns declare, and the order of severity."""
    assert {*map_columns.ORDERS} == map_columns.SORT_KEYS.keys()
    assert {*top_columns.ORDERS} == top_columns.SORT_KEYS.keys()
    assert {*waste_columns.ORDERS} == {"severity", *waste_columns.SORT_KEYS}


def test_headers_can_be_left_out() -> None:
    """--no-headers leaves every line but the titles as it is."""
    found = node_of("a")
    for table in (map_table, top_table):
        whole = table(found, Shape()).splitlines()
        assert [line.split() for line in table(found, Shape(headers=False)).splitlines()] == [
            line.split() for line in whole[1:]
        ]


def test_an_empty_table_is_a_sentence() -> None:
    """Where there is no device, each table says so, and why; never an empty table."""
    for table in TABLES:
        text = table(published(empty_node()), Shape())
        assert text.startswith("No devices.\n")
        assert "DEVICE" not in text


# --- where it is shown ------------------------------------------------------------------------------------------------


def test_columns_align_by_what_a_terminal_shows() -> None:
    """East Asian characters take two cells, marks over others none: the columns after them are still in line."""
    found = node_of("学習用のポッド", "e\u0301\u0301tude", "plain")
    for table in (map_table, top_table):
        lines = table(found, Shape()).splitlines()
        title = "CONTAINER"
        starts = {cells(line[: line.index(" main ") + 1]) for line in lines if " main " in line}
        assert starts == {cells(lines[0][: lines[0].index(title)])}


def test_a_pipe_gets_everything() -> None:
    """However long a name is, a pipe cuts and colours nothing. Only a map has at most 120 columns."""
    name = "n" * 253
    for table in TABLES:
        text = table(node_of(name), Shape(wide=table is map_table))
        assert name in text
        assert "\x1b" not in text
    assert max(map(cells, map_table(node_of(name), Shape()).splitlines())) == 120


def test_colours_repeat_words() -> None:
    """Squatters and faults are red, the rest plain; without the colours the text is the same."""
    pod = Pod("ml", "squat", {"main": {}})
    offered = {"nvidia.com/gpu": [str(CARD)]}
    node = TestNode([Gpu(0), Gpu(1, fault="lost")], [pod], [Process(11, CARD, pod)], offered)
    node.collect()
    found = published(node.collect())
    for table in TABLES:
        coloured = table(found, Shape(screen=Screen(200, colours=True)))
        plain = table(found, Shape(screen=Screen(200)))
        assert "\x1b[31m" in coloured
        assert (
            coloured.replace("\x1b[31m", "").replace("\x1b[33m", "").replace("\x1b[1m", "").replace("\x1b[0m", "")
            == "\n".join(line.rstrip() for line in plain.splitlines()) + "\n"
        )


# --- odd names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("columns", [None, 100])
def test_odd_names_are_harmless(kind: str, columns: int | None) -> None:
    """Wherever a name comes from, it steers no terminal, makes no line of its own, and widens no narrow table."""
    odd, plain = named(ODD[kind]), named("plain")
    for table in TABLES:
        shape = Shape(processes=table is top_table, screen=Screen(columns))
        text = table(odd, shape)
        assert all(one.isprintable() or one in "\n\u200e" for one in text)
        if columns is None:  # else sentences go on below
            assert text.count("\n") == table(plain, shape).count("\n")
        rows = [line for line in text.splitlines() if "assigned" in line or "OWNER" in line]
        assert columns is None or max(map(cells, rows), default=0) <= columns
        table(odd, Shape(wide=True))


def named(name: str) -> Node:
    """A node on which everything has this name that can: pods, containers, ids, processes, model and fault."""
    pod = Pod(name, name, {name: {"nvidia.com/gpu": [str(CARD)]}})
    other = Pod("ml", "other", {"main": {"nvidia.com/gpu": [name]}})
    node = TestNode([Gpu(0), Gpu(1)], [pod, other])
    node.processes = [Process(10, CARD, pod, container=name, comm=name), Process(11, CARD, Pod("x", name), comm=name)]
    node.collect()
    found = published(node.collect())
    first, second = found.gpus
    return changed(found, gpus=(changed(first, model=name), changed(second, fault=name)))


def test_right_to_left_text_ends_before_the_next_cell() -> None:
    """A terminal that reorders it would take the numbers after it along: a mark ends it."""
    assert contained("שלום") == "שלום\u200e"
    assert contained("plain 1 学習") == "plain 1 学習"


def test_what_is_not_printable_is_replaced() -> None:
    """Controls, escapes, direction marks and characters of no width become question marks, one each."""
    for kind in ("bidi controls", "zero width", "line breaks", "escapes"):
        text = printable(ODD[kind])
        assert len(text) == len(ODD[kind])
        assert not [one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp")]
        assert "?" in text


def test_cells() -> None:
    """As a terminal counts them."""
    widths = {"": 0, "plain": 5, "学習": 4, "ｆ": 2, "e\u0301": 1, "\u1112\u1161\u11ab": 2, "…": 1, "🚀": 2}
    assert {text: cells(text) for text in widths} == widths


@pytest.mark.parametrize("text", ["abcdefghij", "学習用のポッド", "e\u0301" * 9, "a学" * 5])
def test_shortened_text_fits(text: str) -> None:
    """Start and end stay, with … between; a wide character is never cut in two, and no mark loses its letter."""
    for room in range(1, 12):
        short = shortened(text, room)
        assert cells(short) <= room
        if cells(text) > room:
            head, _, tail = short.partition("…")
            assert text.startswith(head)
            assert text.endswith(tail)
            assert not tail or not unicodedata.combining(tail[0])
        else:
            assert short == text


def test_wrapped_text_keeps_its_words() -> None:
    """Lines fit, words are whole where they can be, and nothing is lost."""
    text = "one two 学習用のポッド averyveryverylongword end"
    lines = list(wrapped(text, 10))
    assert all(cells(line) <= 10 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert lines[0] == "one two"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (60, "1m"), (90, "90s"), (330, "5m30s"), (3600, "1h"), (5400, "1h30m"), (7260, "2h1m"), (172800, "2d")],
)
def test_durations_read_as_people_write_them(seconds: int, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize("query", CASES)
def test_words_select_rows(query: str) -> None:
    """Devices that the words describe, and rows that match them; the page's filter has the same cases."""
    (node,) = select_rows(NodeMaps((filter_node(),)), "", query.split(" ")).maps
    selected = set()
    for device, device_rows in rows(node):
        names = ["/".join(filter(None, row.container)) or row.pod for row in device_rows if row.owner != "unaccounted"]
        selected |= {f"{device.name.partition(' ')[0]} {name}" for name in names or [""]}
    assert selected == CASES[query]


def test_a_selection_has_nothing_of_others() -> None:
    """A namespace or words without a match show no fault of a GPU. Processes are selected one by one."""
    node = published(busy_node(3))
    for table in (map_table, top_table):
        assert table(node, Shape(namespace="web")).startswith("Namespace web has no")
        assert table(node, Shape(words=("pod-0-1x",))) == "Nothing matches pod-0-1x; did you mean pod-0-1?\n"
    for word, hint in (
        ("gpu:99", "; the node has GPU 0, 1, 2"),
        ("gpu7", "; did you mean gpu:7?"),
        ("finding:squat", "; did you mean finding:squatter?"),
        ("node:x", ". Try gpu: uuid: model: xid: ns: pod: container: owner: finding:"),
    ):
        assert map_table(node, Shape(words=(word,))) == f"Nothing matches {word}{hint}\n"
    assert "GPU 2" in map_table(node, Shape(words=("gpu:2",)))
    assert "GPU 2" not in map_table(node, Shape(words=("gpu:0",)))
    lines = top_table(filter_node(), Shape(processes=True, words=("ml", "python3"))).splitlines()
    assert [line.split()[1] for line in lines[1:2]] == ["11"]
    assert "shared by 2" in map_table(filter_node(), Shape(words=("container:logger",)))
