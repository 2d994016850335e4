"""The dialect cadvisor."""

from gpumap.families import Family

FAMILIES: tuple[Family, ...] = ()
