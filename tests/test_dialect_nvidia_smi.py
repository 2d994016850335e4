"""The dialect nvidia-smi: the original's names, label and units, and what is not known is absent."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from gpumap.agent.dialects.nvidia_smi import COUNTED_EVENTS, EVENTS, FAMILIES, plain
from gpumap.model.readings import CLOCK_EVENT_TIMES, CLOCK_EVENTS, GpuProcess, GpuReading, Uuid
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import ESCAPED, TITAN, card, node, page, process, rows
from tests.dialect_samples import nvml
from tests.snapshots import empty_node, gpu, with_node

BOARD = Path(__file__).parent / "boards" / "14574.json"


def value(snapshot: Snapshot, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    return rows(FAMILIES, snapshot, f"nvidia_smi_{name}", *labels)


def changed(snapshot: Snapshot, change: Callable[[GpuReading], GpuReading]) -> Snapshot:
    """The same node, every GPU of it with another reading."""
    cards = (structs.replace(one, reading=one.reading and change(one.reading)) for one in snapshot.node.gpus)
    return with_node(snapshot, gpus=tuple(cards))


# --- the page ---------------------------------------------------------------------------------------------------------


# --- what is not known ------------------------------------------------------------------------------------------------


def test_what_a_card_does_not_support_is_absent() -> None:
    """A card that reports only its name has its info, its index, and no other series."""
    blank = GpuReading(0, uuid=Uuid(TITAN[0]))
    snapshot = changed(node("n", [card(0, TITAN[0], "TITAN V")], visible=False), lambda _: blank)
    (bare,) = snapshot.node.gpus
    snapshot = with_node(snapshot, gpus=(structs.replace(bare, recovery_action=None),))
    found = re.findall(r"^(\w+)\{.*uuid=", page(FAMILIES, snapshot), re.MULTILINE)
    assert found == ["nvidia_smi_gpu_info", "nvidia_smi_index"]


@pytest.mark.parametrize(
    ("reason", "code"),
    [("library_not_found", 12), ("driver_not_loaded", 9), ("lost", 15), ("worker_crashed", 255), ("hung", 255)],
)
def test_a_driver_that_does_not_answer_has_nvidia_smis_exit_code(reason: str, code: int) -> None:
    """By its manual where it has one for the reason, 255 otherwise; the failure is counted, and there is no GPU."""
    down = nvml(empty_node(), up=False, reason=reason, attempts=3, failures=3, last_success=1.75e9)
    assert value(down, "command_exit_code") == {(): code}
    assert value(down, "failed_scrapes_total") == {(): 3}
    assert value(down, "last_collect_success") == {(): 0}
    assert value(down, "last_collect_success_timestamp_seconds") == {(): 1.75e9}
    assert value(down, "gpu_info", "uuid") == {}


def test_before_the_first_collection_nvml_is_unknown() -> None:
    """Not even whether NVML answers: no 0, no 1."""
    fresh = nvml(empty_node(), attempts=0)
    assert page(FAMILIES, fresh) == ""


# --- clocks, errors, enums --------------------------------------------------------------------------------------------


def test_clock_events_are_those_of_the_driver() -> None:
    """Of its own and of those with a counted time: a word that is none of them would never have a value."""
    assert set(EVENTS) < set(CLOCK_EVENTS)
    assert set(COUNTED_EVENTS) < set(CLOCK_EVENT_TIMES)


@pytest.mark.parametrize(
    ("action", "number"), [("none", 0), ("node_reboot", 2), ("drain_and_reset", 4), ("code_12", 12), ("odd", None)]
)
def test_recovery_actions_are_nvml_hs_numbers(action: str, number: int | None) -> None:
    """Also one that nvml.h has not had yet; a word that is none has no number."""
    snapshot = with_node(empty_node(), gpus=(structs.replace(gpu(0), recovery_action=action),))
    assert set(value(snapshot, "gpu_recovery_action", "uuid").values()) == ({number} if number is not None else set())


# --- processes --------------------------------------------------------------------------------------------------------


def test_processes_are_those_with_a_compute_context() -> None:
    """By pid, name and card, with their memory if the driver reports it; what only draws is none of them."""
    listed = tuple(GpuProcess(pid, None, "C") for pid in (7, 8))
    snapshot = node(
        "n",
        [card(0, TITAN[0], "TITAN V")],
        processes=[
            process(7, TITAN[0], 700, ESCAPED, 'py"th\\on\n'),
            process(8, TITAN[0], None),
            structs.replace(process(9, TITAN[0], 50), type="G"),
        ],
    )
    snapshot = nvml(changed(snapshot, lambda reading: structs.replace(reading, processes=listed)), up=True)
    labels = "pid", "process_name", "uuid"
    uuid = plain(Uuid(TITAN[0]))
    assert value(snapshot, "compute_app_used_memory_bytes", *labels) == {("7", 'py"th\\on\n', uuid): 700 << 20}
    assert value(snapshot, "compute_app_info", *labels).keys() == {("7", 'py"th\\on\n', uuid), ("8", "python", uuid)}
    assert value(snapshot, "compute_apps", "uuid") == {(uuid,): 2}
    assert value(snapshot, "compute_apps_last_collect_success") == {(): 1}


def test_an_idle_card_has_no_processes() -> None:
    """0 where NVML lists them and there is none; absent where it lists none, as on some virtual GPUs."""
    bare = node("n", [card(0, TITAN[0], "TITAN V")])
    idle = changed(bare, lambda reading: structs.replace(reading, processes=()))
    assert set(value(idle, "compute_apps", "uuid").values()) == {0}
    assert value(changed(bare, lambda reading: structs.replace(reading, processes=None)), "compute_apps", "uuid") == {}


def test_without_pid_visibility_no_process_is_reported() -> None:
    """PIDs of another PID namespace name nothing here: the collection of processes has failed, and says so."""
    seen = process(7, TITAN[0], 700)
    blind = node("n", [card(0, TITAN[0], "TITAN V")], processes=[seen], visible=False)
    blind = nvml(changed(blind, lambda reading: structs.replace(reading, processes=())), up=True)
    assert value(blind, "compute_app_info", "pid") == value(blind, "compute_apps", "uuid") == {}
    assert value(blind, "compute_apps_last_collect_success") == {(): 0}


# --- its board and its alerts -----------------------------------------------------------------------------------------


def test_every_name_that_the_board_queries_is_known() -> None:
    """14574's queries name families of this dialect, but for panels that are listed as those that cannot."""
    ours = {family.name for family in FAMILIES}
    for panel in json.loads(BOARD.read_text(encoding="utf-8")):
        requests = {
            name for query in panel["queries"] for name in re.findall(r"nvidia_smi_[a-z0-9_]*[a-z0-9]\b", query)
        }
        unknown = {name for name in requests - ours if not any(one.startswith(name) for one in ours)}
        assert bool(unknown) == ("cannot" in panel), (panel["panel"], unknown)
