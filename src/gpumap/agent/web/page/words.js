// Numbers, times and names as people read them. What is not known is a dash that says why, never 0.

import { h } from "./dom.js";

const MIB = 2 ** 20;

export function bytes(value) {
  const mib = Math.abs(value) / MIB;
  const sign = value < 0 ? "−" : "";
  if (value === 0) return "0";
  if (mib < 1) return `${sign}${Math.ceil(Math.abs(value) / 1024)} KiB`;
  if (mib < 1000) return `${sign}${mib.toFixed(0)} MiB`;
  const gib = mib / 1024;
  return `${sign}${gib.toFixed(gib < 100 ? 1 : 0)} GiB`;
}

export const percent = (ratio) => `${(ratio * 100).toFixed(0)} %`;

export const share = (gpus) => (Number.isInteger(gpus) ? String(gpus) : gpus.toPrecision(2).replace(/\.?0+$/, ""));

/** A value, or a dash with the reason why there is none. */
export function known(value, form, reason) {
  if (value !== null && value !== undefined) return form(value);
  return h("span", { class: "unknown", role: "img", title: reason, "aria-label": `unknown: ${reason}` }, "–");
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 100) return `${whole} s`;
  const minutes = Math.round(whole / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.round(minutes / 60);
  return hours < 48 ? `${hours} h` : `${Math.round(hours / 24)} d`;
}

export const moment = (seconds) =>
  new Date(seconds * 1000)
    .toISOString()
    .replace("T", " ")
    .replace(/\.\d+Z/, " UTC");

/** The time of day. */
export const clock = (seconds) => `${moment(seconds).slice(11, 16)} UTC`;

export const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;

/** A foreign text: what does not print, or turns the direction of what follows, is spelled out. */
export const printable = (text) =>
  String(text).replace(
    /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cs}]/gu,
    (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`,
  );

/** A sentence of gpumap's own, with its commands and values marked. */
export const prose = (text) =>
  printable(text)
    .split("`")
    .map((part, at) => (at % 2 ? h("code", {}, part) : part));

/** A foreign text in an element that keeps its direction to itself. */
export const name = (text, attributes) => h("bdi", attributes, printable(text));

export const OWNERS = {
  assigned: "assigned",
  unassigned: "not assigned",
  gone: "pod is gone",
  host: "host",
  mps_server: "MPS server",
  sibling: "sibling instance",
  unknown: "owner unknown",
  unaccounted: "unaccounted",
};

export const OWNER_MEANS = {
  assigned: "The kubelet assigned this device to the container.",
  unassigned: "A live pod's container uses this device, though the kubelet did not assign it.",
  gone: "Left over from a pod that no longer exists.",
  host: "Processes that are in no pod.",
  mps_server: "The MPS server, which computes for its clients.",
  sibling: "Processes of the other compute instances that share this memory.",
  unknown: "No source could tell the pod or the container, or whether it holds the device.",
  unaccounted: "Used, but by no process that NVML lists: the driver's own, or processes that do not tell theirs.",
};

export const FINDING_MEANS = {
  squatter: "It uses a device that the kubelet did not assign to it.",
  leftover: "Its pod is gone, and its processes still use the device.",
  over: "It uses more memory than it was granted.",
  idle: "It holds the device, and has not computed for a while.",
  unused: "It was granted more memory than it uses.",
  unmatched: "It was assigned slots that are on no known device.",
};

export const FAULTS = {
  lost: "fell off the bus, or was removed",
  reset_required: "must be reset before it can be used",
  insufficient_power: "lacks power: look at its power cables",
  irq_issue: "has an interrupt problem",
  no_permission: "may not be read by gpumap",
  hung: "does not answer NVML's calls",
  worker_crashed: "crashes the driver library when it is asked",
  unknown: "gives an error that NVML does not explain",
};

/** Why clocks are lower than work would have them. */
export const SLOWED = {
  sw_power_cap: "its power limit",
  hw_slowdown: "the hardware",
  sw_thermal_slowdown: "heat",
  hw_thermal_slowdown: "heat (hardware)",
  hw_power_brake_slowdown: "a power brake",
};

export const CAPABILITIES = {
  pid_visibility: "processes of other containers",
  device_checkpoint: "the kubelet's device checkpoint",
  pod_logs: "names of pods' log directories",
  process_utilization: "SM time of each process",
  push: "a collection as soon as the kubelet allocates",
  gpm: "GPM metrics (Hopper and later)",
  xid_events: "XID errors",
};
