"""A simulated GPU node: what `gpumap demo` shows, and the fake kubelet of the tests.

Input: a scenario (a YAML file). Output: a socket, files and the lines of an NVML worker, where the real sources read
them. Nothing here knows what the pipeline makes of them. Read in this order:

1. The scenario: `scenario_model` declares its nouns, which are the keys of the YAML; `scenario` reads it,
`scenario_pods` completes it, and `allocation` assigns the devices.

2. The world (events over time): `schedule`, then `world`, with `texts` for files and `readings` for NVML.

3. The node: `node` with its files and its `kubelet`, and `driver` in the place of the NVML worker.

4. `run`, the command.
"""
