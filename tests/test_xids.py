"""XID errors reduced: how many, the time without a listener, the containers, and what a source keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gpumap.agent.join import step
from gpumap.agent.join.inventory import KnownGpu, take_inventory
from gpumap.agent.join.settings import GPUS_AWAY_MAX, KEPT_SECONDS, UNSEEN_SECONDS
from gpumap.agent.join.xids import CARRIED_SECONDS, JITTER_SECONDS, XidMemory, count_xids
from gpumap.agent.nvml_worker.wire import ListeningMessage, ListeningPeriod, XidMessage
from gpumap.agent.sources.nvml_state import MOST_EVENTS, XidEvents
from gpumap.model.node import ContainerOnDevice, ContainerXids, GpuXids
from gpumap.model.observations import Complaint, Failed, Moment, NvmlReading, Observed
from gpumap.model.readings import GpuReading, Listening, MigInstance, Uuid, XidError
from gpumap.model.terms import ContainerName
from tests.nodes import RULES, Pod, Process, TestNode, gpu_uuid
from tests.nodes import Gpu as NodeGpu

A, B = Uuid("GPU-a"), Uuid("GPU-b")
WHOLE_A = GpuReading(0, uuid=A)
MIG_1, MIG_2, MIG_3 = Uuid("MIG-1"), Uuid("MIG-2"), Uuid("MIG-3")
PARTITIONED_A = GpuReading(
    0,
    uuid=A,
    partitioned=True,
    instances=(
        MigInstance(MIG_1, 1, 0, "1g", 1, None, ()),
        MigInstance(MIG_2, 2, 0, "2g", 1, None, ()),
        MigInstance(MIG_3, 2, 1, "2g", 1, None, ()),
    ),
)
TRAIN, SERVE = ContainerName("ml", "train", "main"), ContainerName("ml", "serve", "main")

BOOT = 1_800_000_000.0
"""Unix seconds."""


class XidNode:
    """Collections one after the other; times are of the monotonic clock, and a collection takes no time."""

    def __init__(self) -> None:
        self.memory = XidMemory()
        self.known: tuple[KnownGpu, ...] = ()
        self.count = 0
        self.gpus: tuple[GpuXids, ...] = ()
        self.last_at: dict[Uuid, dict[int, float]] = {}
        self.meanings: dict[Uuid, dict[int, str]] = {}
        """Apart from `gpus`, where every test would have to say both."""
        self.containers: tuple[ContainerXids, ...] = ()

    def collect(
        self,
        at: float,
        heard: Iterable[tuple[Uuid, float, float]] = (),
        events: Iterable[XidError] = (),
        gpus: tuple[GpuReading, ...] = (WHOLE_A,),
        on: Iterable[tuple[ContainerName, Uuid]] = (),
        *,
        list_current: bool = True,
        finished: float | None = None,
    ) -> XidNode:
        """A reading, with stretches and events at absolute times (an `XidError`'s age is one, until it is here)."""
        ages = tuple(one._replace(age_seconds=at - one.age_seconds) for one in events)
        listening = tuple(Listening(uuid, at - since, at - until) for uuid, since, until in heard)
        reading = NvmlReading("", "", "", gpus, ages, listening)
        return self._step(Observed(reading, Moment(at, BOOT + at), 0.0), on, list_current, finished)

    def fail(
        self,
        at: float,
        reason: str = "driver_not_loaded",
        on: Iterable[tuple[ContainerName, Uuid]] = (),
        *,
        list_current: bool = True,
    ) -> XidNode:
        return self._step(Failed(Moment(at, 0.0), 0.0, (Complaint(reason, ""),)), on, list_current, None)

    def _step(
        self,
        nvml: Observed[NvmlReading] | Failed,
        on: Iterable[tuple[ContainerName, Uuid]],
        list_current: bool,
        finished: float | None,
    ) -> XidNode:
        reading = nvml.value if isinstance(nvml, Observed) else None
        inventory = take_inventory(reading, 0.0, self.known, self.count)
        self.known, self.count = inventory.known, inventory.count
        rows = tuple(ContainerOnDevice(*name, uuid) for name, uuid in on)
        self.memory, gpus, self.containers = count_xids(
            self.memory,
            nvml,
            inventory,
            rows,
            list_current=list_current,
            finished=nvml.at.monotonic if finished is None else finished,
        )
        self.gpus = tuple(structs.replace(one, last_at={}, meanings={}) for one in gpus)
        self.last_at = {one.uuid: one.last_at for one in gpus}
        self.meanings = {one.uuid: one.meanings for one in gpus}
        return self

    @property
    def blind(self) -> float:
        assert len(self.gpus) == 1
        return self.gpus[0].blind_seconds


def xid(at: float, code: int = 31, uuid: Uuid = A, gi: int | None = None, ci: int | None = None) -> XidError:
    return XidError(uuid, code, gi, ci, at)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_the_counter_is_0_before_the_first_event() -> None:
    assert XidNode().collect(10.0, [(A, 9.5, 9.9)]).gpus == (GpuXids(A, {}, 0.0),)


def test_known_codes_say_what_they_mean() -> None:
    node = XidNode().collect(10.0, [(A, 9.0, 10.0)], [xid(9.1, 79), xid(9.2, 5000)])
    assert node.meanings[A] == {79: "GPU has fallen off the bus"}


def test_when_each_code_came_last_is_remembered() -> None:
    """By the wall clock, the newest of a code whatever the order, and as long as the counts are."""
    node = XidNode().collect(10.0, [(A, 0.0, 10.0)], [xid(8.0), xid(9.5, 79), xid(7.0), xid(9.0)])
    assert node.last_at[A] == {31: BOOT + 9.0, 79: BOOT + 9.5}
    node.collect(20.0, [(A, 10.0, 20.0)], [xid(15.0)])
    assert node.collect(30.0).last_at[A] == {31: BOOT + 15.0, 79: BOOT + 9.5}


def test_the_last_event_is_known() -> None:
    """By its time, not by its place in the report; of one moment the last one; and until there is another."""
    node = XidNode().collect(10.0, [(A, 9.0, 10.0)], [xid(9.9, 79), xid(9.2, 31)])
    assert [one.last_code for one in node.gpus] == [79]
    assert [one.last_code for one in node.collect(20.0, [(A, 9.0, 20.0)]).gpus] == [79]
    node.collect(30.0, [(A, 9.0, 30.0)], [xid(25.0, 43), xid(25.0, 45)])
    assert [one.last_code for one in node.gpus] == [45]


def test_a_gpu_without_event_support_has_no_series() -> None:
    """Neither its errors nor its blind time: an unsupported GPU has no series."""
    assert XidNode().collect(10.0).collect(20.0).gpus == ()


def test_a_gpu_without_a_uuid_since_a_restart_may_be_a_known_one() -> None:
    """What was remembered goes on when it answers: the time between was blind, and the driver was loaded again."""
    node = XidNode()
    node.memory = XidNode().collect(10.0, [(A, 9.0, 10.0)], [xid(9.5)]).memory
    node.fail(20.0).collect(30.0, gpus=(GpuReading(0, fault="lost"),))
    assert node.gpus == ()
    assert node.collect(40.0, [(A, 40.0, 40.0)]).gpus == (GpuXids(A, {31: 1}, 30.0, 31, before_reset=(31,)),)


# --- blind time -------------------------------------------------------------------------------------------------------


def test_memory_of_another_boot_counts_from_now() -> None:
    """Sums go on; the time between is not known, and the clock of then says nothing."""
    before = XidNode().collect(1e6, [(A, 9.0, 1e6 - 5)], [xid(1e6 - 7)]).collect(1e6 + 100).memory
    node = XidNode()
    node.memory = XidMemory({uuid: gpu._replace(settled_until=None) for uuid, gpu in before.gpus.items()})
    assert node.collect(10.0, [(A, 9.0, 10.0)]).gpus == (GpuXids(A, {31: 1}, 105.0, 31),)


class Session(NamedTuple):
    """A worker's life: it listens for a while after a pause, and reads are reported at the ends of the parts."""

    deaf_seconds: float
    parts: list[float]
    lags: list[float]
    fails: list[str | None]


SECONDS = st.floats(0.01, 20.0)
REASONS = st.sampled_from([None, None, None, "deadline_exceeded", "worker_crashed", "driver_not_loaded"])
SESSIONS = st.lists(
    st.builds(
        Session,
        SECONDS,
        st.lists(SECONDS, min_size=1, max_size=4),
        st.lists(st.floats(0.0, 30.0), min_size=4, max_size=4),
        st.lists(REASONS, min_size=4, max_size=4),
    ),
    max_size=6,
)


@given(SESSIONS)
def test_blind_time_is_never_less_than_the_time_without_a_listener(sessions: list[Session]) -> None:
    """It never goes back, is at most all the time since the GPU was first seen, and at least what no stretch covers."""
    node, now = XidNode().collect(100.0), 100.0
    first_seen, covered, blind = now, [(now, now)], 0.0
    for session in sessions:
        now = since = now + session.deaf_seconds
        proven = since
        for seconds, lag, reason in zip(session.parts, session.lags, session.fails, strict=False):
            now += seconds
            if reason is not None:
                node.fail(now, reason)
            else:
                proven = max(proven, now - lag)
                node.collect(now, [(A, since, proven)])
                covered.append((since, proven))
            answer = node.gpus[0].blind_seconds if node.gpus else 0.0
            assert blind <= answer <= now - first_seen + 1e-6
            blind = answer
    node.fail(now)
    node.fail(now)
    unheard = now - first_seen - measure(covered)
    total = node.memory.gpus[A].blind_seconds
    assert unheard - JITTER_SECONDS <= total <= now - first_seen + 1e-6


@given(st.lists(st.tuples(SECONDS, SECONDS, st.booleans()), min_size=1, max_size=12))
def test_blind_time_is_exactly_the_time_without_a_listener(registrations: list[tuple[float, float, bool]]) -> None:
    """To the second, if each stretch is proven up to the read that reports it, and ends are reported."""
    node, now = XidNode().collect(100.0), 100.0
    deaf = 0.0
    for pause, seconds, told_down in registrations:
        if told_down:
            node.fail(now + pause / 2)
        deaf += pause
        since = now + pause
        now = since + seconds
        assert node.collect(now, [(A, since, now)]).blind == pytest.approx(deaf)


def measure(stretches: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for since, until in sorted(stretches):
        total += max(0.0, until - max(since, end))
        end = max(end, until)
    return total


# --- containers -------------------------------------------------------------------------------------------------------


def test_containers_before_the_event_are_credited() -> None:
    """By the collection before: who came since is not, and who has left since is."""
    node = XidNode().collect(10.0, on=[(TRAIN, A)])
    node.collect(20.0, events=[xid(15.0)], on=[(SERVE, A)])
    assert node.containers == (ContainerXids(*TRAIN, A, 31, 1),)
    node.collect(30.0, events=[xid(25.0, 79)._replace(times=2)], on=[(SERVE, A)])
    assert list(node.containers) == [ContainerXids(*SERVE, A, 79, 2), ContainerXids(*TRAIN, A, 31, 1)]


def test_a_late_event_is_of_the_containers_of_its_time() -> None:
    """Also where two collections have been since, or many that failed."""
    node = XidNode().collect(10.0, on=[(TRAIN, A)]).collect(11.0, on=[(SERVE, A)]).collect(12.0, on=[(SERVE, A)])
    node.collect(13.0, events=[xid(10.5)], on=[(SERVE, A)])
    assert node.containers == (ContainerXids(*TRAIN, A, 31, 1),)
    for at in range(20, 100):
        node.fail(float(at), "deadline_exceeded")
    node.collect(100.0, events=[xid(14.0, 79)])
    assert ContainerXids(*SERVE, A, 79, 1) in node.containers


@pytest.mark.parametrize(
    ("gi", "ci", "credited"),
    [
        (None, None, [("all", A), ("one", A), ("parent", A), ("two", A)]),
        (1, None, [("all", MIG_1), ("one", MIG_1), ("parent", A)]),
        (2, None, [("all", MIG_2), ("parent", A), ("two", MIG_2)]),
        (2, 1, [("all", MIG_3), ("parent", A), ("two", MIG_3)]),
        (5, 0, [("all", A), ("parent", A)]),
    ],
)
def test_an_event_of_a_mig_device_counts_once_for_each_container_on_it(
    gi: int | None, ci: int | None, credited: list[tuple[str, Uuid]]
) -> None:
    """Under the part that it names, or the first of several; under the GPU for who has that, or where it names none."""
    has = {"all": (A, MIG_1, MIG_2, MIG_3), "one": (MIG_1,), "parent": (A,), "two": (MIG_3, MIG_2)}
    on = [(ContainerName("ml", pod, "main"), uuid) for pod, uuids in has.items() for uuid in uuids]
    node = XidNode().collect(10.0, on=on, gpus=(PARTITIONED_A,))
    node.collect(20.0, events=[xid(15.0, gi=gi, ci=ci)], gpus=(PARTITIONED_A,))
    assert [(one.name.pod, one.uuid, one.errors) for one in node.containers] == [(*one, 1) for one in credited]


def test_what_counts_under_the_gpu_stays_while_a_part_is_held() -> None:
    """A container of a MIG device has no row on the GPU itself, and is not gone for that."""
    node = XidNode().collect(10.0, on=[(TRAIN, MIG_1)], gpus=(PARTITIONED_A,))
    node.collect(20.0, events=[xid(15.0)], on=[(TRAIN, MIG_1)], gpus=(PARTITIONED_A,))
    for at in range(30, 1000, 10):
        node.collect(float(at), on=[(TRAIN, MIG_1)], gpus=(PARTITIONED_A,))
    assert node.containers == (ContainerXids(*TRAIN, A, 31, 1),)


def test_errors_are_kept_for_a_while_after_the_container() -> None:
    """Five minutes after it was last seen; a successor under the same name goes on from the sum."""
    node = XidNode().collect(10.0, on=[(TRAIN, A)]).collect(20.0, events=[xid(15.0)])
    assert node.collect(20.0 + KEPT_SECONDS - 1).containers == (ContainerXids(*TRAIN, A, 31, 1),)
    back = 20.0 + KEPT_SECONDS - 0.5
    node.collect(back, on=[(TRAIN, A)]).collect(back + 10, events=[xid(back + 5)], on=[(TRAIN, A)])
    assert node.containers == (ContainerXids(*TRAIN, A, 31, 2),)
    assert node.collect(back + 11 + KEPT_SECONDS).containers == ()


def test_errors_do_not_expire_while_ends_are_unknown() -> None:
    """Without a List or without NVML a missing row says nothing; the while begins when both are there again."""
    node = XidNode().collect(10.0, on=[(TRAIN, A)]).collect(20.0, events=[xid(15.0)])
    node.fail(1000.0)
    node.collect(2000.0, list_current=False)
    assert node.collect(2000.0 + KEPT_SECONDS - 1).containers == (ContainerXids(*TRAIN, A, 31, 1),)
    assert node.collect(2001.0 + KEPT_SECONDS).containers == ()


def test_the_last_seen_containers_are_credited_without_a_list() -> None:
    """A kubelet that is away does not take the event from the containers."""
    node = XidNode().collect(10.0, on=[(TRAIN, A)]).collect(20.0, list_current=False)
    node.collect(30.0, events=[xid(25.0)], list_current=False)
    assert node.containers == (ContainerXids(*TRAIN, A, 31, 1),)


def test_a_container_of_long_ago_is_not_credited() -> None:
    """While no source reports that a container has left, it may still be there for a minute; after that it may not."""
    node = XidNode().collect(10.0, on=[(TRAIN, A)])
    for at in range(20, int(CARRIED_SECONDS) + 11, 10):
        node.collect(float(at), on=[(SERVE, A)], list_current=False)
    for after, code in ((20.0, 31), (30.0, 79)):
        came = CARRIED_SECONDS + after - 5.0
        node.collect(came + 5.0, events=[xid(came, code)], on=[(SERVE, A)], list_current=False)
    assert node.containers == (
        ContainerXids(*SERVE, A, 31, 1),
        ContainerXids(*SERVE, A, 79, 1),
        ContainerXids(*TRAIN, A, 31, 1),
    )


def test_little_is_remembered_without_a_list() -> None:
    """However many containers come and go: an event is of those of the last minute, and their errors go in an hour."""
    node = XidNode()
    for number in range(500):
        on = [(ContainerName("ml", f"job-{number}", "main"), A)]
        node.collect(10.0 * number, events=[xid(10.0 * number - 1)], on=on, list_current=False)
        assert sum(one.errors for one in node.containers) <= (UNSEEN_SECONDS / 10 + 1) * (CARRIED_SECONDS / 10 + 2)
        assert len(node.memory.present) <= CARRIED_SECONDS / 10 + 1
    assert len(node.containers) <= UNSEEN_SECONDS / 10 + CARRIED_SECONDS / 10 + 1
    assert node.collect(5000.0 + UNSEEN_SECONDS, list_current=False).containers == ()


def test_few_gpus_that_are_gone_are_remembered() -> None:
    node = XidNode()
    for number in range(GPUS_AWAY_MAX + 20):
        uuid = Uuid(f"GPU-{-number}")
        node.collect(10.0 * number, [(uuid, 10.0 * number, 10.0 * number)], gpus=(GpuReading(0, uuid=uuid),))
    node.collect(5000.0)
    assert list(node.memory.gpus) == [*(Uuid(f"GPU-{-number}") for number in range(20, GPUS_AWAY_MAX + 20)), A]


def test_the_snapshot_has_holders_and_users_of_the_gpu() -> None:
    """By (container, device), whether it was given the device or not; and whether anybody listens."""
    holder = Pod("ml", "holder", {"main": {"nvidia.com/gpu": [str(gpu_uuid(0))]}})
    squatter = Pod("ml", "squatter", {"main": {"nvidia.com/gpu": [str(gpu_uuid(1))]}})
    processes = [Process(10, gpu_uuid(0), squatter), Process(11, gpu_uuid(0), None)]
    node = TestNode([NodeGpu(0), NodeGpu(1)], [holder, squatter], processes)
    assert not node.collect().node.capabilities["xid_events"]
    node.clock += 5
    observations = node.observe()
    assert isinstance(observations.nvml, Observed)
    events = (XidError(gpu_uuid(0), 79, None, None, 1.0),)
    reading = replace(observations.nvml.value, xids=events, listening=(Listening(gpu_uuid(0), 4.0, 0.5),))
    _, snapshot = step(node.memory, replace(observations, nvml=replace(observations.nvml, value=reading)), RULES)
    last_at = {79: observations.nvml.at.wall - events[0].age_seconds}
    meanings = {79: "GPU has fallen off the bus"}
    assert snapshot.node.xids == (GpuXids(gpu_uuid(0), {79: 1}, 1.0, 79, last_at, meanings),)
    who = [ContainerXids(*pod.full(), gpu_uuid(0), 79, 1) for pod in (holder, squatter)]
    assert snapshot.node.container_xids == tuple(who)
    assert snapshot.node.capabilities["xid_events"]


# --- what a source keeps ----------------------------------------------------------------------------------------------


def test_a_source_keeps_events_until_a_reading_returns_them() -> None:
    """Once, with ages; the newest end of each stretch."""
    news = XidEvents()
    news.add(XidMessage(A, 31, 1, 0, 10.0, 2))
    news.add(ListeningMessage((ListeningPeriod(A, 5.0, 9.0),)))
    news.add(ListeningMessage((ListeningPeriod(A, 5.0, 11.0), ListeningPeriod(B, 6.0, 7.0))))
    news.add(ListeningMessage((ListeningPeriod(A, 11.5, 12.0),)))
    events, listening = news.take(20.0)
    assert events == (XidError(A, 31, 1, 0, 10.0, 2),)
    assert listening == (Listening(A, 15.0, 9.0), Listening(B, 14.0, 13.0), Listening(A, 8.5, 8.0))
    assert news.take(21.0) == ((), ())


def test_a_flood_is_kept_in_little_and_counted_in_full() -> None:
    """Beyond a thousand events that no read asked for yet, equal ones are reported together."""
    news = XidEvents()
    for number in range(5 * MOST_EVENTS):
        news.add(XidMessage(A, 13 + number % 3, None, None, float(number)))
    events, _ = news.take(1e5)
    assert len(events) <= MOST_EVENTS
    assert sum(event.times for event in events) == 5 * MOST_EVENTS
    assert {event.code for event in events} == {13, 14, 15}
