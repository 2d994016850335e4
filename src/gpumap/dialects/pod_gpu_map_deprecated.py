"""The dialect pod-gpu-map-deprecated."""

from gpumap.families import Numbered

FAMILIES: tuple[Numbered, ...] = ()
