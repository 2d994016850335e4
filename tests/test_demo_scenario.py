"""A scenario's mistakes are told in one line that names their place; its devices are given as a kubelet gives them."""

import re
from pathlib import Path

import pytest

from gpumap.demo.hardware import FAULTS, GPU_KEYS
from gpumap.demo.pods import CONTAINER_KEYS, POD_KEYS, PROCESS_KEYS
from gpumap.demo.scenario import ScenarioError, default_scenario, load_scenario, parse_scenario

GPUS = """
gpus:
  - {model: H100, memory: 80GiB}
  - {model: H100, memory: 80GiB, replicas: 2}
  - {model: H100, memory: 80GiB, mig: [1g.10gb, {profile: 3g.40gb, compute: [1c.3g.40gb, 2c.3g.40gb]}]}
"""
POD = "pods:\n  - name: a\n    containers:\n      - "

MISTAKES = [
    ("gpu: []", 'scenario: unknown key "gpu" (did you mean "gpus"?)'),
    ("gpus: 3", 'gpus: expected a list, found "3"'),
    ("pods: []", 'scenario: "gpus" is missing'),
    ("- a", "scenario: expected a mapping, found a list"),
    ("", "scenario: expected a mapping, found nothing"),
    ("gpus: [\npods", "line 2: not YAML: expected ',' or ']', but got '<stream end>'"),
    ("node: a\nnode: b", 'line 2: key "node" stands twice'),
    ("gpus: [{model: H100, memory: 80GB}]", 'gpus[0].memory: expected a size such as 20GiB or 512MiB, found "80GB"'),
    ("repeat: 90\ngpus: []", 'repeat: expected a time such as 90s or 1m30s, found "90"'),
    ("repeat: 0s\ngpus: []", 'repeat: expected a time longer than 0s, found "0s"'),
    ("node: A_b\ngpus: []", 'node: expected a Kubernetes name (a-z, 0-9, - and .), found "A_b"'),
    (GPUS + "cgroups: v3", 'cgroups: expected one of v2-systemd, v2-cgroupfs, v1-cgroupfs, found "v3"'),
    (GPUS + "kubelet: {away: [{from: 2m, until: 1m}]}", "kubelet.away[0]: ends before it begins"),
    (
        GPUS + "kubelet: {away: [{from: 4m, until: 5m}]}",
        "kubelet.away[0]: ends at 305s, after the play (repeat: 300s)",
    ),
    (
        "gpus: [{model: H100, memory: 80GiB, mig: [4g.40gb, 4g.40gb]}]",
        "gpus[0].mig: the profiles take 8 of 7 slices",
    ),
    (
        "gpus: [{model: H100, memory: 80GiB, mig: [2h.20gb]}]",
        "gpus[0].mig[0].profile: expected a MIG profile such as 1g.10gb or 1c.3g.40gb",
    ),
    (
        "gpus: [{model: H100, memory: 80GiB, mig: [{profile: 3g.40gb, compute: [2c.3g.40gb, 2c.3g.40gb]}]}]",
        "gpus[0].mig[0].compute: takes more than the 3 slices of 3g.40gb",
    ),
    (
        "gpus: [{model: H100, memory: 80GiB, mig: [1g.10gb], replicas: 4}]",
        'gpus[0].replicas: a GPU with "mig" cannot have replicas',
    ),
    (
        "gpus:\n"
        "  - {model: A, memory: 80GiB, uuid: GPU-b1028956-cfa2-4990-bf4a-5da9abb51763}\n"
        "  - {model: A, memory: 80GiB, uuid: GPU-b1028956-cfa2-4990-bf4a-5da9abb51763}",
        "gpus[1]: uuid GPU-b1028956-cfa2-4990-bf4a-5da9abb51763 is also that of gpus[0]",
    ),
    (
        "gpus: [{model: A, memory: 80GiB, faults: [{kind: dead, until: 1m}]}]",
        "gpus[0].faults[0].kind: expected one of lost, hung, reset_required, insufficient_power, irq_issue, "
        'no_permission, unknown, found "dead"',
    ),
    (GPUS + POD + "{name: c, gpus: [7]}", "pods[0].containers[0].gpus[0]: there is no gpu 7 (this node has 3)"),
    (
        GPUS + POD + "{name: c, gpus: [1]}",
        'pods[0].containers[0].gpus[0]: gpu 1 is shared, ask for its slots with "slots"',
    ),
    (
        GPUS + POD + "{name: c, gpus: [2]}",
        'pods[0].containers[0].gpus[0]: gpu 2 is partitioned, ask for its devices with "mig"',
    ),
    (
        GPUS + POD + "{name: c, mig: {gpu: 2, instance: 3}}",
        "pods[0].containers[0].mig: gpu 2 has no MIG device 3 (it has 3)",
    ),
    (
        GPUS + POD + "{name: c, slots: {gpu: 1, count: 3}}",
        "pods[0].containers[0].slots: asks for 3 slots of gpu 1, which has 2",
    ),
    (
        GPUS + POD + "{name: c, slots: [{gpu: 1, count: 2}, {gpu: 1}]}",
        "pods[0].containers[0].slots[1]: gpu 1 has 2 slots, 0 of them free at that time",
    ),
    (
        GPUS + POD + "{name: c, ids: {aliyun.com/gpu-mem: ['{9}-_-0']}}",
        "pods[0].containers[0].ids.aliyun.com/gpu-mem[0]: there is no gpu 9 (this node has 3)",
    ),
    (
        GPUS + POD + "{name: c, gpus: [0], processes: [{memory: 1GiB, memmory: 2}]}",
        'pods[0].containers[0].processes[0]: unknown key "memmory" (did you mean "memory"?)',
    ),
    (
        GPUS + POD + "{name: c, gpus: [0], processes: [{memory: 1GiB, sm: 180%}]}",
        "pods[0].containers[0].processes[0].sm: expected a ratio from 0 to 1, or a percentage such as 40%, "
        'found "180%"',
    ),
    (
        GPUS + POD + "{name: c, processes: [{memory: 1GiB}]}",
        'pods[0].containers[0].processes[0]: its container holds no device, so it needs "gpu" or "mig"',
    ),
    (
        GPUS + POD + "{name: c, gpus: [0], processes: [{memory: 90GiB}]}",
        "pods[0].containers[0].processes[0]: with it, processes use 90.0 GiB of gpu 0 at 0s, "
        "which has 79.5 GiB for them",
    ),
    (GPUS + POD + "{name: c}\n    leaks: true", 'pods[0]: "leaks" needs an "until", which its processes outlive'),
    (GPUS + POD + "{name: c, init: true}", 'pods[0]: needs a container that is not "init"'),
    (GPUS + POD + "{name: c}\n      - {name: c}", 'pods[0]: has two containers named "c"'),
    (
        GPUS + POD + "{name: c, gpus: [0]}\n  - {name: b, containers: [{name: c, gpus: [0]}]}",
        "pods[1].containers[0].gpus[0]: gpu 0 is held by default/a at that time",
    ),
    (
        GPUS + POD + "{name: c}\n  - {name: a, containers: [{name: c}]}",
        "pods[1]: default/a is there at that time, by pods[0]",
    ),
    (
        GPUS + POD + "{name: c, gpus: [0], processes: [{memory: 1GiB, until: 2m}]}\n    until: 1m",
        'pods[0].containers[0].processes[0]: lives until 120s, but its pod needs (unless it has "leaks") it to end '
        "at 59s",
    ),
    (
        GPUS + "kubelet: {away: [{from: 1m, until: 2m}]}\n" + POD + "{name: c}\n    from: 90s",
        "pods[0]: cannot start at 90s, while the kubelet is away",
    ),
    (
        GPUS + "host_processes: [{gpu: 0, memory: 1GiB, comm: a-very-long-command}]",
        "host_processes[0].comm: expected a command name of 1 to 15 characters, no control character, /, ( or ), "
        'found "a-very-long-command"',
    ),
]


def test_a_name_too_long_for_its_log_directory() -> None:
    """A file name has 255 characters at most: the place is told, and how long it would be."""
    longest = 255 - len("default__") - 36
    assert parse_scenario(GPUS + POD.replace("name: a", f"name: {'a' * longest}") + "{name: c}")
    with pytest.raises(ScenarioError, match=r"^pods\[0\]: its log directory .* has 256 characters"):
        parse_scenario(GPUS + POD.replace("name: a", f"name: {'a' * (longest + 1)}") + "{name: c}")


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_names_its_place(text: str, message: str) -> None:
    """Each mistake is one line that says where it is and what is wrong."""
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text)
    assert str(caught.value) == message


def test_a_file_is_named_with_its_mistake(tmp_path: Path) -> None:
    """A mistake in a file, or a file that is not there, begins with the file's name."""
    broken = tmp_path / "broken.yaml"
    broken.write_text("gpus: 3")
    for path in (broken, tmp_path / "missing.yaml"):
        with pytest.raises(ScenarioError, match=str(path)):
            load_scenario(path)


def test_the_default_play_shows_every_situation() -> None:
    """The embedded scenario has each kind of device and trouble that gpumap is about."""
    scenario = default_scenario()
    assert len(scenario.gpus) == 8
    assert any(gpu.mig for gpu in scenario.gpus)
    assert any(gpu.replicas for gpu in scenario.gpus)
    assert any(gpu.faults for gpu in scenario.gpus)
    assert any(pod.static for pod in scenario.pods)
    assert any(pod.leaks for pod in scenario.pods)
    assert any(container.init for pod in scenario.pods for container in pod.containers)
    assert scenario.away
    assert scenario.host_processes


def test_the_documented_example_is_valid() -> None:
    """The example of docs/scenario.md can be played, and has every key that a scenario may have."""
    document = (Path(__file__).parent.parent / "docs" / "scenario.md").read_text(encoding="utf-8")
    example = document.partition("```yaml\n")[2].partition("```")[0]
    assert len(parse_scenario(example).pods) == 3
    keys = {*GPU_KEYS, *POD_KEYS, *CONTAINER_KEYS, *PROCESS_KEYS, "cgroup", "static_pods_for"}
    assert [key for key in keys if not re.search(rf"\b{key}\b", example)] == []
    assert [kind for kind in FAULTS if kind not in example] == []


def test_derived_names_depend_on_the_node_alone() -> None:
    """Two readings of one text agree on every uuid; another node has others."""
    first, second, other = (parse_scenario(text) for text in (GPUS, GPUS, "node: b\n" + GPUS))
    assert first.gpus == second.gpus
    assert {gpu.uuid for gpu in first.gpus}.isdisjoint(gpu.uuid for gpu in other.gpus)


def test_init_containers_hand_their_slot_on() -> None:
    """A container uses again what its pod's init container held, as the kubelet's devicesToReuse does."""
    text = (
        GPUS + POD + "{name: main, slots: {gpu: 1}}\n      - {name: warm, init: true, slots: {gpu: 1}}\n    until: 1m"
    )
    main, warm = parse_scenario(text).pods[0].containers
    assert main.devices == warm.devices
    assert len(main.devices[0].ids) == 1


def test_a_slot_is_free_again_when_its_pod_has_ended() -> None:
    """Two pods may have one GPU, one after the other."""
    pods = "  - {name: b, from: 1m, containers: [{name: c, gpus: [0]}]}"
    scenario = parse_scenario(GPUS + POD + "{name: c, gpus: [0]}\n    until: 1m\n" + pods)
    first, second = (pod.containers[0].devices for pod in scenario.pods)
    assert first == second


def test_compute_instances_share_a_gpu_instance() -> None:
    """A GPU instance that is split shows as MIG devices with one GPU instance id and its whole memory."""
    _, first, second = parse_scenario(GPUS).gpus[2].mig
    assert (first.profile, first.compute_slices, second.compute_slices) == ("1c.3g.40gb", 1, 2)
    assert first.gpu_instance_id == second.gpu_instance_id
    assert (first.compute_instance_id, second.compute_instance_id) == (0, 1)
    assert first.memory_bytes == second.memory_bytes
    assert first.resource == "nvidia.com/mig-1c.3g.40gb"
