"""The dialect gpu-manager."""

from gpumap.families import Family

FAMILIES: tuple[Family, ...] = ()
