"""The dialect gpu-mem-monitor."""

from gpumap.families import Family

FAMILIES: tuple[Family, ...] = ()
