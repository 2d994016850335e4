// The reasons why a value is not known.

import { hasKubelet } from "./model.js";

export function reasons(map) {
  const source = (name) => map.sources.find((one) => one.source === name);
  const nvmlDown = source("nvml")?.up === false && "NVML is down";
  const kubeletDown = !hasKubelet(map)
    ? "This machine has no kubelet"
    : source("kubelet")?.up === false && "The kubelet does not answer";
  const blind = !map.capabilities.pid_visibility && "Processes of other containers are not visible (hostPID)";
  return (device, row) => {
    const down =
      nvmlDown ||
      (device.gpu?.fault && `The GPU is down: ${device.gpu.fault}`) ||
      (!device.gpu && "NVML does not list this device");
    const sm = device.mig
      ? "Hopper and later report the SM activity of MIG devices; it is known while one container uses the device"
      : "The driver reports no SM time of processes here";
    const whole = row.whole && "It holds the whole GPU: see the row of the GPU";
    const reserved = row.grant?.reservation && "It reserves the GPU for other pods, and is granted nothing";
    const unread = row.owner === "scheduled" && "No source has the share that the scheduler granted (--pods-api-socket)";
    const parent = device.partitioned && "See the MIG devices below";
    const clients = row.processes?.some((one) => one.type?.includes("M")) || row.type?.includes("M");
    return {
      held: whole || kubeletDown || unread || "It is not known whether it holds the device",
      gpus: whole || kubeletDown || reserved || unread || "The share of the GPU is not known",
      granted: whole || kubeletDown || reserved || unread || "This kind of sharing grants no memory (time-slicing), or the amount is not known",
      used: down || blind || parent || "The driver does not report the memory of this process",
      sm: down || blind || parent || (clients ? "The driver reports no SM time for MPS clients" : sm),
      owner: blind || "No source can name its pod",
    };
  };
}
