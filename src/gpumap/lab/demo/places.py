"""Reads which devices of the node a container or a process means, and checks that there are such."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gpumap.lab.demo.scenario_model import Claim, GpuSpec, LeafPlace
from gpumap.lab.demo.yaml_fields import Fields, ScenarioError, expected, integer, one_or_list_of


def gpu_index(value: object, place: str, gpus: Sequence[GpuSpec]) -> int:
    """A GPU by its NVML index."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise expected("the number of a GPU", value, place)
    if not 0 <= value < len(gpus):
        raise ScenarioError(f"{place}: there is no gpu {value} (this node has {len(gpus)})")
    return value


def mig_number(value: int, place: str, gpu: GpuSpec) -> int:
    """A MIG device by its number on its GPU."""
    if value >= len(gpu.mig):
        raise ScenarioError(f"{place}: gpu {gpu.index} has no MIG device {value} (it has {len(gpu.mig)})")
    return value


def read_claims(fields: Fields, gpus: Sequence[GpuSpec]) -> tuple[Claim, ...]:
    """What a container asks for of the node's own plugin: `gpus`, `slots` and `mig`."""
    return (
        *fields.each("gpus", partial(_exclusive, gpus=gpus)),
        *fields.maybe("slots", one_or_list_of(partial(_slots, gpus=gpus)), ()),
        *fields.maybe("mig", one_or_list_of(lambda entry, at: Claim(at, _mig(entry, at, gpus), 1)), ()),
    )


def read_leaves(fields: Fields, gpus: Sequence[GpuSpec], held: tuple[LeafPlace, ...]) -> tuple[LeafPlace, ...]:
    """The devices that a process uses: those that it names, else those that its container claims."""
    if "gpu" in fields or "mig" in fields:
        cards = fields.maybe("gpu", one_or_list_of(partial(gpu_index, gpus=gpus)), ())
        for index in cards:
            if gpus[index].mig:
                raise ScenarioError(f'{fields.at("gpu")}: gpu {index} is partitioned, name its device with "mig"')
        return (
            *(LeafPlace(index) for index in cards),
            *fields.maybe("mig", one_or_list_of(partial(_mig, gpus=gpus)), ()),
        )
    if not held:
        raise ScenarioError(f'{fields.place}: its container holds no device, so it needs "gpu" or "mig"')
    return held


def _exclusive(value: object, place: str, gpus: Sequence[GpuSpec]) -> Claim:
    index = gpu_index(value, place, gpus)
    if gpus[index].mig:
        raise ScenarioError(f'{place}: gpu {index} is partitioned, ask for its devices with "mig"')
    if gpus[index].replicas:
        raise ScenarioError(f'{place}: gpu {index} is shared, ask for its slots with "slots"')
    return Claim(place, LeafPlace(index), 1)


def _slots(value: object, place: str, gpus: Sequence[GpuSpec]) -> Claim:
    fields = Fields(value, place, ("gpu", "count"))
    index = fields.need("gpu", partial(gpu_index, gpus=gpus))
    if not gpus[index].replicas:
        raise ScenarioError(f'{place}: gpu {index} has no slots (it has no "replicas")')
    count = fields.maybe("count", integer(1, 1000), 1)
    if count > gpus[index].replicas:
        raise ScenarioError(f"{place}: asks for {count} slots of gpu {index}, which has {gpus[index].replicas}")
    return Claim(place, LeafPlace(index), count)


def _mig(value: object, place: str, gpus: Sequence[GpuSpec]) -> LeafPlace:
    fields = Fields(value, place, ("gpu", "instance"))
    index = fields.need("gpu", partial(gpu_index, gpus=gpus))
    return LeafPlace(index, mig_number(fields.need("instance", integer(0, 63)), place, gpus[index]))
