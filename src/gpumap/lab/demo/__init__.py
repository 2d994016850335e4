"""A simulated GPU node: what `gpumap demo` shows, and the fake kubelet of the tests.

Input: a scenario (a YAML file). Output: the frames of a capture, which `gpumap.lab.node` plays. Nothing here knows what
the pipeline makes of them. Read in this order:

1. The scenario: `scenario_model` declares its nouns, which are the keys of the YAML; `scenario` reads it,
`scenario_pods` completes it, and `allocation` assigns the devices.

2. The world (events over time): `schedule`, then `world` and its frames, with `texts` for files and `readings` for
NVML.

`kubelet` is the fake kubelet, with its Pods API.
"""
