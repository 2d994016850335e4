"""The dialect dcgm-join."""

from gpumap.families import Family

FAMILIES: tuple[Family, ...] = ()
