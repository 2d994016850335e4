"""The dialect nvidia-smi: the original's names, label and units, and what is not known is absent."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumap.agent.dialects.nvidia_smi import COUNTED_EVENTS, EVENTS, FAMILIES
from gpumap.agent.dialects.nvidia_smi_readers import plain
from gpumap.agent.metrics import GROUPS, native
from gpumap.model.node import GpuXids
from gpumap.model.readings import CLOCK_EVENT_TIMES, CLOCK_EVENTS, DeviceMemory, GpuProcess, GpuReading, Uuid
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import (
    ALONE,
    ESCAPED,
    PARENT,
    SHARED_1,
    TITAN,
    TRAIN,
    WEB,
    card,
    holder,
    node,
    page,
    partitioned,
    process,
    rows,
    used,
)
from tests.dialect_samples import SUPER, nvml, original
from tests.promtool import accepted
from tests.snapshots import busy_node, empty_node, gpu, with_node

BOARD = Path(__file__).parent / "boards" / "14574.json"


def value(snapshot: Snapshot, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    return rows(FAMILIES, snapshot, f"nvidia_smi_{name}", *labels)


def changed(snapshot: Snapshot, change: Callable[[GpuReading], GpuReading]) -> Snapshot:
    """The same node, every GPU of it with another reading."""
    cards = (structs.replace(one, reading=one.reading and change(one.reading)) for one in snapshot.node.gpus)
    return with_node(snapshot, gpus=tuple(cards))


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_samples_of_the_originals_documentation_are_there() -> None:
    """What its docs/METRICS.md shows of one card, line by line; numbers may be written otherwise."""
    uuid = plain(SUPER)
    for name, answer in {
        "utilization_gpu_ratio": 0.42,
        "memory_used_bytes": 7.06740224e08,
        "power_draw_watts": 28.07,
        "temperature_gpu": 34.0,
    }.items():
        assert value(original(), name, "uuid")[uuid,] == answer
    labels = "name", "driver_version", "cuda_version", "pci_bus_id", "index"
    assert value(original(), "gpu_info", "uuid", *labels)[
        uuid, "NVIDIA GeForce RTX 2080 SUPER", "471.11", "11.4", "00000000:71:00.0", "0"
    ] == (1)


def test_uuids_are_in_lower_case_without_prefix() -> None:
    """On every family that has one, of GPUs and of MIG devices."""
    uuids = re.findall(r'uuid="([^"]*)"', page(FAMILIES, busy_node()))
    assert uuids
    assert all(re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid) for uuid in uuids)
    assert plain(Uuid("GPU-ABCDEF00-0000-0000-0000-00000000000A")) == "abcdef00-0000-0000-0000-00000000000a"


# --- what is not known ------------------------------------------------------------------------------------------------


def test_what_a_card_does_not_support_is_absent() -> None:
    """A card that tells nothing but its name has its info, its index, and no other series."""
    blank = GpuReading(0, uuid=Uuid(TITAN[0]))
    snapshot = changed(node("n", [card(0, TITAN[0], "TITAN V")], visible=False), lambda _: blank)
    (bare,) = snapshot.node.gpus
    snapshot = with_node(snapshot, gpus=(structs.replace(bare, recovery_action=None),))
    found = re.findall(r"^(\w+)\{.*uuid=", page(FAMILIES, snapshot), re.MULTILINE)
    assert found == ["nvidia_smi_gpu_info", "nvidia_smi_index"]


def test_a_lost_gpu_is_absent_but_for_what_is_known_of_it() -> None:
    """The original drops it; its XID errors, and what the driver asks for, stand, since alerts wait for them."""
    lost = structs.replace(gpu(0, fault="reset_required"), recovery_action="gpu_reset")
    errors = GpuXids(lost.uuid, {79: 3}, 0.0, 79, {79: 1.75e9})
    text = page(FAMILIES, with_node(empty_node(), gpus=(lost,), xids=(errors,)))
    assert re.findall(r"^(\w+)\{.*uuid=", text, re.MULTILINE) == [
        "nvidia_smi_gpu_recovery_action",
        "nvidia_smi_xid_errors_total",
        "nvidia_smi_xid_last_timestamp_seconds",
    ]


@pytest.mark.parametrize(
    ("reason", "code"),
    [("library_not_found", 12), ("driver_not_loaded", 9), ("lost", 15), ("worker_crashed", 255), ("hung", 255)],
)
def test_a_driver_that_does_not_answer_has_nvidia_smis_exit_code(reason: str, code: int) -> None:
    """By its manual where it has one for the reason, 255 otherwise; the failure is counted, and no GPU stands."""
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
    """Of its own and of those whose time it counts: a word that is none of them would never have a value."""
    assert set(EVENTS) < set(CLOCK_EVENTS)
    assert set(COUNTED_EVENTS) < set(CLOCK_EVENT_TIMES)


@pytest.mark.parametrize(
    ("action", "number"), [("none", 0), ("node_reboot", 2), ("drain_and_reset", 4), ("code_12", 12), ("odd", None)]
)
def test_recovery_actions_are_nvml_hs_numbers(action: str, number: int | None) -> None:
    """Also one that nvml.h has not had yet; a word that is none has no number."""
    snapshot = with_node(empty_node(), gpus=(structs.replace(gpu(0), recovery_action=action),))
    assert set(value(snapshot, "gpu_recovery_action", "uuid").values()) == ({number} if number is not None else set())


# --- MIG --------------------------------------------------------------------------------------------------------------


# --- processes --------------------------------------------------------------------------------------------------------


def test_processes_are_those_with_a_compute_context() -> None:
    """By pid, name and card, with their memory where the driver tells it; what only draws is none of them."""
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


def test_a_process_on_several_mig_devices_is_one_row_of_the_card() -> None:
    """With what it uses on all of them; absent where one does not tell."""
    answer = [process(7, SHARED_1.uuid, 100), process(7, ALONE.uuid, 50), process(8, ALONE.uuid, None)]
    assert value(partitioned([], answer), "compute_app_used_memory_bytes", "pid", "uuid") == {
        ("7", plain(Uuid(PARENT))): 150 << 20
    }


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


OLD_RULES = """\
groups:
  - name: old
    rules:
      - {alert: OldMemory, expr: nvidia_smi_utilization_memory_ratio * 100 > 90}
      - {alert: OldTemperature, expr: nvidia_smi_temperature_gpu > 80}
      - {alert: OldLoad, expr: nvidia_smi_utilization_gpu_ratio > 90}
"""
"""Those of reference 001."""
AGENT = {"namespace": "monitoring", "pod": "gpumap-x", "container": "gpumap"}
"""The labels that the ServiceMonitor's target gives to what has none of its own."""
BUSY = GpuReading(0, utilization_ratio=0.95, memory_controller_busy_ratio=0.05, temperatures_celsius={"gpu": 85.0})


def stressed() -> Snapshot:
    """Cards that are full, hot and busy: one held, one that nobody holds, one whose MIG devices one container holds two
    of; and one that is at rest."""
    full, idle = DeviceMemory(100, 95, 5), DeviceMemory(100, 5, 95)
    cards = []
    for number, memory in enumerate((full, full, full, idle)):
        instances = tuple(structs.replace(one, memory=full) for one in (ALONE, SHARED_1)) if number == 2 else ()
        made = card(number, TITAN[number], "TITAN V", instances=instances)
        answer = BUSY if memory is full else GpuReading(0)
        reading = structs.replace(answer, memory=memory, partitioned=made.partitioned, instances=instances)
        cards.append(structs.replace(made, reading=reading))
    held = [holder(TRAIN, TITAN[0], used(1, 0.95)), *(holder(WEB, one.uuid) for one in (ALONE, SHARED_1))]
    return node("n", cards, held)


def as_scraped(snapshot: Snapshot) -> list[dict[str, str]]:
    """Series for promtool, as Prometheus has them of the chart's ServiceMonitor with honorLabels."""
    families = (*FAMILIES, *native(GROUPS, process_metrics=False))
    target = {
        "job": "gpumap",
        "instance": "n:9401",
        "namespace": "monitoring",
        "pod": "gpumap-x",
        "container": "gpumap",
    }
    series = []
    for family in parse_text(page(families, snapshot)):
        for sample in family.samples:
            labels = ",".join(f'{key}="{text}"' for key, text in {**target, **sample.labels}.items())
            series.append({"series": f"{sample.name}{{{labels}}}", "values": f"{sample.value}x10"})
    return series


def firing(alert: str, **labels: str) -> dict[str, object]:
    """What promtool is to find."""
    answer = {"alertname": alert, "alertstate": "firing", "instance": "n:9401", **labels}
    return {"labels": "ALERTS{" + ",".join(f'{key}="{text}"' for key, text in answer.items()) + "}", "value": 1}


def old_alerts() -> Iterator[dict[str, object]]:
    """The one of heat alone, and it names gpumap's own pod where another could be meant."""
    for index in range(3):
        yield firing("OldTemperature", job="gpumap", **AGENT, uuid=plain(Uuid(TITAN[index])))


def test_the_usual_alerts_fire_only_for_heat(tmp_path: Path) -> None:
    """Those on memory and load do not fire on GPUs that are full and busy; nvidia_gpu_exporter.md says why."""
    query = {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "3m", "exp_samples": list(old_alerts())}
    test: dict[str, object] = {"interval": "1m", "input_series": as_scraped(stressed()), "promql_expr_test": [query]}
    answer = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "rules.yaml").write_text(OLD_RULES, encoding="utf-8")
    (tmp_path / "test.json").write_text(json.dumps(answer), encoding="utf-8")
    accepted("test", "rules", "test.json", cwd=tmp_path)
