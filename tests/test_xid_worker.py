"""XID events as the NVML worker reports them, over the compiled stand-in."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumap.agent.nvml_worker import wire
from gpumap.model.readings import Uuid
from tests import standin
from tests.standin import Code, Driver, Gpu, Xid
from tests.worker import PATIENCE_SECONDS, Start, Worker

A, B, C = (Uuid(f"GPU-00000000-0000-0000-0000-00000000000{letter}") for letter in "abc")
WAIT = "nvmlEventSetWait_v2"
REGISTER = "nvmlDeviceRegisterEvents"
SOON = {"listener.LISTEN_SECONDS": 0.02}
SELDOM = {"listener.LISTEN_SECONDS": 600.0}


def listener(start: Start, driver: Driver, **options: object) -> Worker:
    """A worker that has read once, and listens to what it can."""
    worker = start(groups=("health",), **{"changed": SOON, **options})
    worker.read(driver)
    return worker


def fire(worker: Worker, driver: Driver, *xids: Xid) -> None:
    driver.xids += xids
    driver.write(worker.state)


def next_xid(worker: Worker) -> wire.XidMessage:
    """The next event, reported between reads."""
    while not isinstance(message := worker.answer(), wire.XidMessage):
        assert isinstance(message, wire.ListeningMessage), message
    return message


def content(event: wire.XidMessage) -> tuple[Any, ...]:
    return event.uuid, event.code, event.gpu_instance_id, event.compute_instance_id


def messages(worker: Worker) -> list[wire.XidMessage]:
    return [message for message in worker.unasked if isinstance(message, wire.XidMessage)]


def read(worker: Worker, driver: Driver | None = None, hung: int = 0) -> dict[Uuid, wire.ListeningPeriod]:
    """What a new read says of who is listened to, the newest of each GPU."""
    worker.unasked.clear()
    worker.read(driver, hung=hung)
    return {received.uuid: received for received in stretches(worker)}


def stretches(worker: Worker) -> list[wire.ListeningPeriod]:
    return [
        received
        for message in worker.unasked
        if isinstance(message, wire.ListeningMessage)
        for received in message.periods
    ]


def until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


# --- an event ---------------------------------------------------------------------------------------------------------


def test_an_event_is_reported_at_once_and_once(start: Start) -> None:
    """Between two reads, with its GPU, its code and its moment; no read reports it again."""
    driver = Driver(gpus=[Gpu(A), Gpu(B)])
    worker = listener(start, driver)
    before = time.monotonic()
    fire(worker, driver, Xid(1, 31))
    message = next_xid(worker)
    assert content(message) == (B, 31, None, None)
    assert before <= message.monotonic <= time.monotonic()
    assert message.times == 1
    read(worker)
    assert messages(worker) == []


def test_an_event_of_a_mig_device_has_its_ids(start: Start) -> None:
    """The GPU instance and the compute instance, where the driver does not keep them back."""
    driver = Driver(gpus=[Gpu(A)])
    worker = listener(start, driver)
    fire(worker, driver, Xid(0, 13, gi=2, ci=0))
    assert content(next_xid(worker)) == (A, 13, 2, 0)


def test_an_event_is_of_the_device_that_it_names(start: Start) -> None:
    """NVIDIA's mock driver reports an event of one GPU to the event set of another one. Each is reported once."""
    driver = Driver(gpus=[Gpu(A), Gpu(B), Gpu(C)], one_queue=True)
    worker = listener(start, driver)
    fire(worker, driver, Xid(2, 79), Xid(1, 31), Xid(2, 48))
    assert {content(next_xid(worker))[:2] for _ in range(3)} == {(C, 79), (B, 31), (C, 48)}
    read(worker)
    assert messages(worker) == []


def test_a_read_returns_earlier_events_first(start: Start) -> None:
    """The thread that listens is woken: an event comes before the driver's line of the next read."""
    driver = Driver(gpus=[Gpu(A)])
    worker = listener(start, driver, changed=SELDOM)
    fire(worker, driver, Xid(0, 79))
    since = time.monotonic()
    received = read(worker)[A]
    assert [content(message)[:2] for message in messages(worker)] == [(A, 79)]
    assert received.since < since <= received.until


def test_events_from_before_are_not_reported(start: Start) -> None:
    """A listener receives the events from its start on, and reports that time."""
    driver = Driver(gpus=[Gpu(A)], xids=[Xid(0, 13)])
    worker = start(groups=("health",), changed=SOON)
    before = time.monotonic()
    received = read(worker, driver)
    assert messages(worker) == []
    assert before < received[A].since < time.monotonic()
    fire(worker, driver, Xid(0, 31))
    assert next_xid(worker).code == 31


def test_equal_events_of_a_moment_are_one_line(start: Start) -> None:
    """A flood of thousands takes a line for each kind of event, and none of them is lost."""
    driver = Driver(gpus=[Gpu(A)])
    worker = listener(start, driver, changed=SELDOM)
    fire(worker, driver, *[Xid(0, 13 if number % 3 else 31) for number in range(3000)])
    counts: Counter[int] = Counter()
    lines = 0
    while counts.total() < 3000:
        read(worker)
        counts.update({message.code: message.times for message in messages(worker)})
        lines += len(messages(worker))
    assert counts == {13: 2000, 31: 1000}
    assert lines <= 20


# --- who is listened to -----------------------------------------------------------------------------------------------


def test_events_need_the_group_health(start: Start) -> None:
    """Without the group there is no event set, and nothing is said of events."""
    driver = Driver(gpus=[Gpu(A)])
    worker = start(changed=SOON)
    worker.read(driver)
    fire(worker, driver, Xid(0, 13))
    worker.read()
    assert worker.unasked == []


@pytest.mark.parametrize(
    ("gpu", "without"),
    [(Gpu(A, event_types=None), ()), (Gpu(A, event_types=1), ()), (Gpu(A), (REGISTER,)), (Gpu(A), (WAIT,))],
)
def test_a_gpu_without_events_is_not_registered(start: Start, gpu: Gpu, without: tuple[str, ...]) -> None:
    """A GPU without XID events, or a library without the calls, costs nothing but that."""
    worker = start(groups=("health",), changed=SOON, without=without)
    answers = worker.read(Driver(gpus=[gpu]))
    assert answers.gpus[0].fault is None
    assert answers.gpus[0].refusals == {}
    worker.read()
    assert WAIT in without or read(worker) == {}


# --- faults -----------------------------------------------------------------------------------------------------------


def test_events_of_a_hanging_gpu_are_received(start: Start) -> None:
    """Its events are often why; a read that has not come back does not stop the listener."""
    driver = Driver(gpus=[Gpu(A), Gpu(B)])
    worker = listener(start, driver)
    driver.delay = {("nvmlDeviceGetMemoryInfo_v2", 0): float("inf")}
    worker.read(driver, hung=1)
    fire(worker, driver, Xid(0, 119), Xid(1, 13))
    assert {content(next_xid(worker))[:2], content(next_xid(worker))[:2]} == {(A, 119), (B, 13)}


def test_a_wait_that_hangs_costs_its_gpu_alone(start: Start) -> None:
    """Another thread goes on with the others' events, and what can no longer be proven of the one is not claimed."""
    driver = Driver(gpus=[Gpu(A), Gpu(B)])
    worker = listener(start, driver, changed={**SOON, "listener.HUNG_SECONDS": 0.1})
    driver.delay = {(WAIT, 0): float("inf")}
    hung_since = time.monotonic()
    driver.write(worker.state)
    until(lambda: read(worker)[B].until > hung_since + 0.2, "nobody listens to the other GPU")
    assert read(worker)[A].until < hung_since + 0.1
    fire(worker, driver, Xid(0, 79), Xid(1, 13))
    assert content(next_xid(worker))[:2] == (B, 13)
    driver.delay = {}
    driver.write(worker.state)
    assert content(next_xid(worker))[:2] == (A, 79)


def test_a_lost_gpu_does_not_keep_the_listener_busy(start: Start, tmp_path: Path) -> None:
    """Its event set answers with an error at once: it is not asked again; the others' events arrive as before."""
    path = tmp_path / "calls"
    driver = Driver(gpus=[Gpu(A), Gpu(B)])
    worker = listener(start, driver, changed=SELDOM, STANDIN_CALLS=str(path))
    driver.fail = {("*", 0): Code.GPU_IS_LOST}
    lost_at = time.monotonic()
    for _ in range(5):
        received = read(worker, driver)
    assert list(received) == [B]
    fire(worker, driver, Xid(1, 13))
    read(worker)
    assert [content(message)[:2] for message in messages(worker)] == [(B, 13)]
    assert all(one.until < lost_at + PATIENCE_SECONDS for one in received.values())
    driver.fail = {("nvmlDeviceGetCount_v2", "*"): Code.UNKNOWN}
    worker.refusal(driver)
    assert standin.read_calls(path)[WAIT] < 40


def test_a_gpu_that_is_back_is_registered_again(start: Start) -> None:
    """The driver may have forgotten who listened; the time between is in no stretch."""
    driver = Driver(gpus=[Gpu(A)])
    worker = listener(start, driver)
    driver.fail = {("*", 0): Code.GPU_IS_LOST}
    read(worker, driver)
    assert read(worker) == {}
    back_at = time.monotonic()
    driver.fail = {}
    worker.read(driver)
    again = read(worker)[A]
    assert again.since > back_at
    fire(worker, driver, Xid(0, 48))
    assert content(next_xid(worker))[:2] == (A, 48)


def test_event_sets_are_freed_before_nvml_is_shut_down(start: Start, tmp_path: Path) -> None:
    """At each initialisation as many as were made, and the last of their events is reported."""
    path = tmp_path / "calls"
    driver = Driver(gpus=[Gpu(A), Gpu(B)])
    worker = listener(start, driver, changed=SELDOM, STANDIN_CALLS=str(path))
    for number in range(3):
        fire(worker, driver, Xid(0, 13))
        driver.fail = {("nvmlDeviceGetCount_v2", "*"): Code.UNKNOWN}
        before = time.monotonic()
        worker.unasked.clear()
        worker.refusal(driver)
        assert [content(message)[:2] for message in messages(worker)] == [(A, 13)]
        ends = {received.uuid: received.until for received in stretches(worker)}
        assert min(ends[A], ends[B]) >= before
        message = standin.read_calls(path)
        assert message["nvmlEventSetCreate"] == message["nvmlEventSetFree"] == 2 * (number + 1)
        driver.fail = {}
        worker.read(driver)


def test_registrations_leave_no_descriptor_and_no_thread(start: Start) -> None:
    """Twenty more registrations leave no file descriptor and no thread each."""
    driver = Driver(gpus=[Gpu(A)])
    worker = listener(start, driver)
    sizes = []
    for _ in range(2):
        for _ in range(20):
            worker.refusal(Driver(gpus=[Gpu(A)], fail={("nvmlDeviceGetCount_v2", "*"): Code.UNKNOWN}))
            worker.read(driver)
        proc = Path(f"/proc/{worker.process.pid}")
        sizes.append((len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))))
    assert all(late < early + 10 for early, late in zip(*sizes, strict=True))
