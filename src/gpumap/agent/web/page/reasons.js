// Why a value is not known, in the words of who has to explain it at night.

export function reasons(map) {
  const source = (name) => map.sources.find((one) => one.source === name);
  const nvmlDown = source("nvml")?.up === false && "NVML is down";
  const kubeletDown = source("kubelet")?.up === false && "The kubelet does not answer";
  const blind = !map.capabilities.pid_visibility && "Processes of other containers cannot be seen (hostPID)";
  return (device, row) => {
    const down =
      nvmlDown ||
      (device.gpu && !device.gpu.up && `The GPU is down: ${device.gpu.fault}`) ||
      (!device.gpu && "NVML does not name this device");
    const sm = device.mig_profile
      ? "MIG devices keep no SM time by process"
      : "The driver tells no SM time by process here";
    const whole = row.whole && "It holds the whole GPU: see there";
    const parent = device.parent && "Measured on the GPU's instances, below";
    const clients = row.processes?.some((one) => one.type?.includes("M")) || row.type?.includes("M");
    return {
      held: whole || kubeletDown || "Whether it holds the device is not known",
      gpus: whole || kubeletDown || "Nobody can know this share of the GPU",
      granted: whole || kubeletDown || "This kind of assignment grants no memory (time-slicing), or it is not known how much",
      used: down || blind || parent || "The driver does not tell this process's memory",
      sm: down || blind || parent || (clients ? "The driver credits clients of MPS with no SM time" : sm),
      owner: blind || "No source could tell its pod",
    };
  };
}
