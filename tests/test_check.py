"""`gpumap check` and /api/v1/check: one line and a verdict, and no accusation or acquittal without evidence."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any

import pytest

from gpumap.agent.join.inventory import KnownGpu, take_inventory
from gpumap.agent.judgement.judge import RECENT_SECONDS
from gpumap.agent.published import published
from gpumap.cli.commands.doctor import GPU_CHECKS, doctor_checks
from gpumap.cli.table import Shape
from gpumap.model import remedies
from gpumap.model.check import HUNG_SECONDS, LINE_BYTES, check, short_line
from gpumap.model.devices import NO_CONTAINER
from gpumap.model.findings import sort_findings
from gpumap.model.node import Finding, Gpu, GpuXids, NamelessGpu, Node
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import GpuReading, Uuid, XidError
from gpumap.model.remedies import FAULTS, advice
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import GPU_CONDITIONS
from tests.agent import run_agent
from tests.command import run_command, run_command_in_loop
from tests.demo_process import GPUMAP
from tests.nodes import Gpu as Card
from tests.nodes import TestNode, gpu_uuid
from tests.shown import changed, changed_in, judged_again, map_table, top_table, with_gpus
from tests.snapshots import busy_node, empty_node, gpu, with_node

LOST_WORDS = remedies.IN_SHORT["lost"]
BUSY = published(with_node(busy_node(4), nameless_gpus=(), gpus=tuple(map(gpu, range(4)))))
WELL = judged_again(
    BUSY,
    capabilities={**BUSY.capabilities, "xid_events": True},
    gpus=tuple(changed(one, last_success=BUSY.timestamp, not_offered_seconds=0.0) for one in BUSY.gpus),
    xids=tuple(GpuXids(one.uuid, {}, 0.0) for one in BUSY.gpus),
)
"""Four GPUs of which everything is known and well."""


def with_fault(fault: str, *numbers: int, silent_seconds: float = 0.0) -> Node:
    """The node with GPUs that do not answer: of such a GPU, no reading is known."""

    last_success = WELL.timestamp - silent_seconds
    gone = {"fault": fault, "last_success": last_success, "reading": None, "recovery_action": None}
    return with_gpus(WELL, lambda on: changed(on, **gone), *numbers)


def with_xid(code: int, age_seconds: float | None) -> Node:
    last_at = {} if age_seconds is None else {code: WELL.timestamp - age_seconds}
    one, other, *rest = WELL.xids
    return judged_again(WELL, xids=(one, changed(other, counts={code: 1}, last_code=code, last_at=last_at), *rest))


def recovering(action: str) -> Node:
    return with_gpus(WELL, lambda on: changed(on, recovery_action=action), 1)


def with_ecc(grew_seconds_ago: float) -> Node:
    at = WELL.timestamp - grew_seconds_ago
    return with_gpus(WELL, lambda on: changed(on, ecc_uncorrected_at=at), 1)


def flagged(name: str) -> Node:
    return with_gpus(WELL, lambda on: changed_in(on, "reading", **{name: True}), 1)


PROBLEMS = {
    "down": with_fault("lost", 1),
    "row_remap_failure": flagged("row_remap_failure"),
    "recovery_action": recovering("node_reboot"),
    "ecc_uncorrected": with_ecc(1.0),
    "xid": with_xid(48, 1.0),
    "row_remap_pending": flagged("row_remap_pending"),
}


def test_the_conditions() -> None:
    of_doctor = [one.removeprefix("gpu/<index>").removeprefix("/") or "down" for one in GPU_CHECKS]
    assert sorted(GPU_CONDITIONS) == sorted(of_doctor) == sorted([*PROBLEMS, "not_offered"])


def test_a_healthy_node() -> None:
    assert check(WELL) == (0, "4 GPUs well")
    assert [check(WELL, [name]) for name in GPU_CONDITIONS] == [(0, f"4 GPUs well ({name})") for name in GPU_CONDITIONS]


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem(name: str) -> None:
    """1 with all conditions and with its own, naming the GPU; the other conditions do not report it."""
    node = PROBLEMS[name]
    whole = check(node)
    assert whole == check(node, [name])
    assert whole.code == 1
    assert whole.line.startswith("GPU 1 ")
    others = [check(node, [other]).code for other in GPU_CONDITIONS if other != name]
    assert others == [2 if name == "down" else 0] * (len(GPU_CONDITIONS) - 1), "nothing else is known of a lost GPU"


@pytest.mark.parametrize("fault", remedies.FAULTS)
def test_faults(fault: str) -> None:
    """A fault is a problem if only the GPU can cause it, and unknown if gpumap or its container can."""
    verdict = check(with_fault(fault, 0, silent_seconds=HUNG_SECONDS))
    unclear = ("no_permission", "worker_crashed", "unknown")
    assert verdict.code == (2 if fault in unclear else 1)
    assert verdict.line == (
        f"GPU 0 cannot be read: {fault}" if fault in unclear else f"GPU 0 {remedies.IN_SHORT[fault]}"
    )


def test_a_gpu_hangs_only_after_a_while() -> None:
    """A driver under load may not answer for some seconds: unknown until then."""
    assert check(with_fault("hung", 0, silent_seconds=HUNG_SECONDS - 1)).code == 2
    nameless = judged_again(WELL, nameless_gpus=(NamelessGpu(4, "hung"), NamelessGpu(5, "hung")))
    assert check(nameless) == (2, "2 GPUs: hangs (index 4, index 5): cordon the node, then reset the GPU")
    assert check(judged_again(nameless, nameless_gpus=(NamelessGpu(4, "lost"),))).code == 1


WORST_FIRST = (
    *("lost", "reset_required", "insufficient_power", "irq_issue", "no_permission", "hung", "worker_crashed"),
    *("unknown", "not_in_nvml", "row_remap_failure", "recovery_code_9", "ecc_uncorrected", "xid_79"),
    "row_remap_pending",
)


def test_the_worst_reason_comes_first() -> None:
    """The order of reasons is fixed. A word of another version counts as unknown."""
    words = (*WORST_FIRST, "word")
    faults = [Finding(*NO_CONTAINER, finding="fault", reason=word, uuid=None, since=0.0) for word in reversed(words)]
    reasons = [fault.reason for fault in sort_findings(faults)]
    assert [word for word in reasons if word != "word"] == [*WORST_FIRST]
    assert abs(reasons.index("word") - reasons.index("unknown")) == 1


LOST = {"fault": "lost", "last_success": WELL.timestamp, "reading": None, "recovery_action": "node_reboot"}
BROKEN = with_gpus(with_xid(79, 1.0), lambda on: changed(on, **LOST), 1)
"""GPU 1 is lost, and has an XID and a recovery action."""


def test_a_gpu_counts_once() -> None:
    """People see a GPU with several faults in one line. Each reason remains a finding of its own."""
    findings = BROKEN.findings or ()
    assert [(fault.reason, fault.gpus) for fault in findings if fault.finding == "fault"] == [
        ("lost", 1.0),
        ("recovery_node_reboot", 0.0),
        ("xid_79", 0.0),
    ]
    assert BROKEN.finding_sums["faults"] == 1
    also = "; also recovery node reboot, XID 79"
    line = f"GPU 1 fell off the bus{also}. {advice(FAULTS['lost'])}"
    for show in (map_table, top_table):
        assert " ".join(show(BROKEN, Shape()).split()).count(line) == 1
    assert [check.check for check in doctor_checks(BROKEN) if check.check.startswith("gpu/")] == ["gpu/1"]
    assert check(BROKEN).code == 1
    assert check(BROKEN).line == f"GPU 1 {LOST_WORDS}{also}"[:77] + "..."
    assert check(BROKEN, ["xid"]).line == "GPU 1 had XID 79: GPU has fallen off the bus"
    assert check(with_gpus(BROKEN, lambda on: changed(on, **LOST), 2)).line.endswith("... (+1 GPU)")
    hung = with_gpus(BROKEN, lambda on: changed(on, fault="hung"), 1)
    assert check(hung).line == "GPU 1 requires a reboot: drain the node, then reboot", "only this is proved"


def test_gpus_without_a_uuid_count_once() -> None:
    """They share a finding for each reason, with their number and addresses."""
    nameless = (
        NamelessGpu(4, "lost", pci_bus_id="0000:3c:00.0", recovery_action="node_reboot"),
        NamelessGpu(5, "lost", recovery_action="none"),
        NamelessGpu(6, "hung"),
    )
    node = judged_again(BROKEN, nameless_gpus=nameless)
    nameless_faults = [fault for fault in node.findings or () if fault.finding == "fault" and not fault.uuid]
    assert {fault.reason: (fault.gpus, fault.why) for fault in nameless_faults} == {
        "lost": (2.0, "2 GPUs: fell off the bus; also recovery node reboot (0000:3c:00.0, index 5)"),
        "hung": (1.0, "1 GPU: hangs (index 6)"),
        "recovery_node_reboot": (0.0, "1 GPU: requires a reboot (0000:3c:00.0)"),
    }
    assert node.finding_sums["faults"] == 4
    assert "2 GPUs: fell off the bus; also" in map_table(node, Shape())
    assert "A GPU" not in map_table(node, Shape())
    assert check(judged_again(WELL, nameless_gpus=nameless)).line.startswith(f"2 GPUs: {LOST_WORDS}; also")
    assert check(node, ["down"]).line.endswith("... (+1 GPU)")


def test_fatal_xid_codes() -> None:
    """Those of EKS's node monitoring agent 1.7, without 63 and 109. No other code is a problem of the GPU."""
    eks = "46, 48, 54, 62, 63, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158"
    fatal = {int(code) for code in eks.split(", ")} - {63, 109}
    assert {code for code in range(1, 1000) if check(with_xid(code, 1.0)).code == 1} == fatal


@pytest.mark.parametrize(
    ("node", "code"),
    [
        (with_xid(48, RECENT_SECONDS - 1), 1),
        (with_xid(48, RECENT_SECONDS), 0),
        (with_xid(48, None), 0),
        (with_xid(13, 1.0), 0),
        (with_ecc(RECENT_SECONDS - 1), 1),
        (with_ecc(RECENT_SECONDS), 0),
        (recovering("code_99"), 1),
    ],
)
def test_errors_of_now(node: Node, code: int) -> None:
    """An error counts for an hour; one of an unknown time, or of an application, is no problem of the GPU."""
    assert check(node).code == code


def without(name: str, on: Gpu) -> Gpu:
    if name == "recovery_action":
        return changed(on, recovery_action=None)
    if name == "ecc_uncorrected":
        return changed_in(on, "reading", ecc_errors={})
    return changed_in(on, "reading", **{name: None})


@pytest.mark.parametrize(
    ("life", "ends"),
    [
        (({"energy_joules": 900.0}, {"energy_joules": 5.0}), True),
        (({}, {"recovery_action": "gpu_reset"}, {"recovery_action": "none"}), True),
        (({"fault": "lost", "recovery_action": "node_reboot"}, {"recovery_action": "none"}), True),
        (("driver_not_loaded", "deadline_exceeded", {}), True),
        (({"fault": "hung"}, {}), False),
        (({"fault": "lost"}, {"energy_joules": 901.0}), False),
        (({"recovery_action": "gpu_reset"}, {}), False),
        (({"recovery_action": "none"}, {"recovery_action": "gpu_reset"}), False),
        (("library_not_found", {}), False),
    ],
    ids=str,
)
def test_a_fatal_xid_ends_with_a_reset(life: tuple[dict[str, Any] | str, ...], ends: bool) -> None:
    """Evidence of a reset or of a reload of the driver ends it."""
    node = TestNode([Card(0, values={"energy_joules": 900.0}), Card(1)])
    node.collect()
    node.xids = (XidError(gpu_uuid(0), 79, None, None, 1.0),)
    assert _xid_faults(node.collect()) == {"xid_79": gpu_uuid(0)}
    for state in life:
        node.down, node.nvml_reason = ({"nvml"}, state) if isinstance(state, str) else (set(), "")
        values = {} if isinstance(state, str) else state
        node.gpus[0].values = values if "fault" in values else {"energy_joules": 900.0, **values}
        node.gpus[0].fault = values.get("fault")
        snapshot = node.collect()
    assert _xid_faults(snapshot) == ({} if ends else {"xid_79": gpu_uuid(0)})
    assert snapshot.node.xids[0].last_code == 79, "counters and the last error stay"
    node.xids = (XidError(gpu_uuid(0), 79, None, None, 1.0),)
    assert _xid_faults(node.collect()).keys() == {"xid_79"}


def test_an_xid_error_in_the_reading_that_shows_a_reset_is_a_fault() -> None:
    """It may have come after the reset."""
    node = TestNode([Card(0, values={"energy_joules": 900.0})])
    node.collect()
    node.gpus[0].values, node.xids = {"energy_joules": 5.0}, (XidError(gpu_uuid(0), 79, None, None, 1.0),)
    assert _xid_faults(node.collect()) == {"xid_79": gpu_uuid(0)}


def _xid_faults(snapshot: Snapshot) -> dict[str, str | None]:
    return {fault.reason: fault.uuid for fault in snapshot.node.findings or () if fault.reason.startswith("xid_")}


@pytest.mark.parametrize("name", ["row_remap_failure", "recovery_action", "ecc_uncorrected", "row_remap_pending"])
def test_what_no_gpu_reports(name: str) -> None:
    """Asked for, it is unknown, unless another GPU of the node reports it: then this GPU does not support it."""
    nowhere = with_gpus(WELL, lambda on: without(name, on))
    assert check(nowhere, [name]) == (2, f"GPU 0: {name} is not reported (driver, GPU or --collect)")
    assert check(nowhere).code == 0
    assert check(with_gpus(WELL, lambda on: without(name, on), 0), [name]).code == 0


def test_no_evidence_at_all() -> None:
    """A stale map, NVML down and a driver without GPUs are unknown: a problem was not seen, nor its absence."""
    stale = "no collection for more than 60 s: collections are late, fail or hang: see gpumap's log"
    assert check(changed(WELL, gpus=(), stale=stale)) == (2, short_line(f"no current data: {stale}"))
    assert check(published(empty_node())).code == 2
    assert check(changed(WELL, gpus=())) == (2, "the driver lists no GPU")
    down = tuple(changed(one, up=one.source != "nvml", reason="driver_not_loaded") for one in WELL.sources)
    assert check(changed(WELL, sources=down)) == (2, "NVML does not answer: driver_not_loaded")


def test_the_line_is_never_cut() -> None:
    """The longest index, the most GPUs and each text: node-problem-detector shows 80 bytes."""
    texts = {*remedies.IN_SHORT.values(), *(f"had XID {code}: {remedies.XIDS[code]}" for code in remedies.FATAL_XIDS)}
    assert all(len(f"GPU 15 {text} (+15 GPUs)".encode("ascii")) <= LINE_BYTES for text in texts)
    assert all(
        len(f"GPU 15: {name} is not reported (driver, GPU or --collect)") <= LINE_BYTES for name in GPU_CONDITIONS
    )
    assert {*remedies.RECOVERY} <= {*remedies.IN_SHORT}
    assert short_line("node \N{SNOWMAN}\n" + "x" * 90) == "node ? " + "x" * 70 + "..."


@pytest.mark.parametrize("code", [46, 48, 74, 79])
def test_the_remedy_of_an_xid_error_is_that_of_its_code(code: int) -> None:
    """A fault of an XID error says what to do about this code, with the GPU's index."""
    (fault,) = (fault for fault in with_xid(code, 1.0).findings or () if fault.reason == f"xid_{code}")
    assert fault.remedy == remedies.FATAL_XIDS[code].replace("<index>", "1")


def test_when_memory_errors_grew() -> None:
    """The counts are of the GPU's life: only growth is news, of each location, also after a reading without it."""
    uuid = Uuid("GPU-1")

    def at(wall: float, known: tuple[KnownGpu, ...], **errors: int) -> tuple[tuple[KnownGpu, ...], float | None]:
        reading = GpuReading(0, uuid=uuid, ecc_errors={"corrected": {"dram": int(wall)}, "uncorrected": errors})
        inventory = take_inventory(NvmlReading("1", "1", "1", gpus=(reading,)), wall, known, len(known) or 1)
        return inventory.known, inventory.gpus[0].ecc_uncorrected_at

    known, grew = at(1.0, (), dram=5, sram=3)
    assert grew is None
    known, grew = at(2.0, known, dram=5)
    assert grew is None
    known, grew = at(3.0, known, dram=5, sram=3)
    assert grew is None, "a count that returns is not growth"
    known, grew = at(4.0, known, dram=5, sram=4)
    assert grew == 4.0
    known, grew = at(5.0, known, dram=0, sram=4)
    assert grew == 4.0
    lost = GpuReading(0, uuid=uuid, fault="lost")
    known = take_inventory(NvmlReading("1", "1", "1", gpus=(lost,)), 6.0, known, 1).known
    known, grew = at(7.0, known, dram=1, sram=4)
    assert grew == 7.0, "it is remembered while the GPU is away"


async def test_an_agent() -> None:
    """The command and the endpoint give the same; the demo has one GPU that waits for a reset."""
    async with run_agent("demo", "--interval", "200ms") as agent:
        await agent.until(lambda page: page.up("nvml"), "NVML does not answer")

        async def ask(*words: str) -> tuple[int, str, str]:
            done: subprocess.CompletedProcess[str] = await run_command_in_loop("check", "--url", agent.url, *words)
            return done.returncode, done.stdout, done.stderr

        line = "GPU 5 needs a reset to replace bad memory rows\n"
        assert await ask() == (1, line, "")
        assert await ask("--only", "down", "--only", "xid") == (0, "8 GPUs well (down, xid)\n", "")
        assert (await agent.get("/api/v1/check")).text == f"1 {line}"
        assert (
            await agent.get("/api/v1/check?only=down&only=xid&node=demo-node")
        ).text == "0 8 GPUs well (down, xid)\n"
        assert (await agent.get("/api/v1/check?node=b")).text == "2 the gpumap of node demo-node answers, not of b\n"
        wrong = await agent.get("/api/v1/check?only=bogus")
        assert (wrong.status, wrong.text) == (400, "2 unknown condition bogus\n")
        url = agent.url
    gone = await run_command_in_loop("check", "--url", url)
    assert (gone.returncode, gone.stdout, gone.stderr) == (
        2,
        short_line(f"{url}/api/v1/map did not answer: connection refused") + "\n",
        "",
    )


async def test_a_verdict_that_cannot_be_written() -> None:
    """The exit code stays: neither a closed pipe is well, nor a full disk a problem."""
    async with run_agent("demo", "--interval", "200ms") as agent:
        await agent.until(lambda page: page.up("nvml"), "NVML does not answer")
        for output in ("closed", "full"):
            for words, code in (((), 1), (("--only", "down"), 0)):
                assert await asyncio.to_thread(_exit_code, output, "--url", agent.url, *words) == code


def _exit_code(output: str, *words: str) -> int:
    """Run the check with an output that cannot be written."""
    if output == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, target = os.pipe()
        os.close(reader)
    try:
        command = [str(GPUMAP), "check", *words]
        return subprocess.run(command, stdout=target, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode
    finally:
        os.close(target)


def test_a_mistake() -> None:
    done = run_command("check", "--only", "bogus")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith('gpumap: --only: unknown value "bogus"; valid values: down, ')
