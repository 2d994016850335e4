// The reasons why a value is not known.

import { hasKubelet } from "./model.js";

export function reasons(map) {
  const down = (source) => map.sources.some((row) => row.source === source && !row.up) && `${source} is down`;
  const kubelet = hasKubelet(map) ? down("kubelet") : "This machine has no kubelet";
  const blind = map.remedies.pid_visibility;
  return (device, row) => {
    const unread =
      down("nvml") ||
      (device.gpu?.fault && `The GPU is down: ${device.gpu.fault}`) ||
      (!device.gpu && "NVML does not list this device");
    const sm = device.mig
      ? "Hopper and later report the SM activity of MIG devices; it is known while one container uses the device"
      : "The driver reports no SM time of processes here";
    const share =
      (row.whole && "It holds the whole GPU: see the row of the GPU") ||
      kubelet ||
      (row.grant?.reservation && "It reserves the GPU for other pods, and is granted nothing") ||
      (row.owner === "scheduled" && "No source has the share that the scheduler granted (--pods-api-socket)");
    const parent = device.partitioned && "See the MIG devices below";
    const clients = row.processes?.some((process) => process.type?.includes("M")) || row.type?.includes("M");
    return {
      held: share || "It is not known whether it holds the device",
      gpus: share || "The share of the GPU is not known",
      granted: share || "This kind of sharing grants no memory (time-slicing), or the amount is not known",
      used: unread || blind || parent || "The driver does not report the memory of this process",
      sm: unread || blind || parent || (clients ? "The driver reports no SM time for MPS clients" : sm),
      owner: blind || "No source can name its pod",
    };
  };
}
