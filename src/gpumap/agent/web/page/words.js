// Numbers, times and names for people. An unknown value is a dash with the reason, never 0.

import { h } from "./dom.js";

const MIB = 2 ** 20;
const TAIL = 6; // characters that a cut name keeps at its end, as of a pod of a Deployment

export function bytes(value) {
  const mib = Math.abs(value) / MIB;
  const sign = value < 0 ? "−" : "";
  if (value === 0) return "0";
  if (mib < 1) return `${sign}${Math.ceil(Math.abs(value) / 1024)} KiB`;
  if (mib < 1000) return `${sign}${mib.toFixed(0)} MiB`;
  const gib = mib / 1024;
  return `${sign}${gib.toFixed(gib < 100 ? 1 : 0)} GiB`;
}

export const percent = (ratio) => `${(ratio * 100).toFixed(0)}\u00a0%`;

export const share = (gpus) => (Number.isInteger(gpus) ? String(gpus) : gpus.toPrecision(2).replace(/\.?0+$/, ""));

/** Return a value, or a dash that opens the reason. */
export function known(value, form, reason) {
  if (value !== null && value !== undefined) return form(value);
  return h("button", { type: "button", class: "unknown", title: reason, "aria-label": `unknown: ${reason}` }, "–");
}

export function duration(seconds) {
  const wholeSeconds = Math.max(0, Math.round(seconds));
  if (wholeSeconds < 100) return `${wholeSeconds} s`;
  const minutes = Math.round(wholeSeconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.round(minutes / 60);
  return hours < 48 ? `${hours} h` : `${Math.round(hours / 24)} d`;
}

export const moment = (seconds) =>
  new Date(seconds * 1000)
    .toISOString()
    .replace("T", " ")
    .replace(/\.\d+Z/, " UTC");

/** Return the time of day. */
export const clock = (seconds) => `${moment(seconds).slice(11, 16)} UTC`;

export const count = (number, noun, plural = `${noun}s`) => `${number} ${number === 1 ? noun : plural}`;

/** Escape a foreign text: characters that do not print, or that change the direction of text. */
export const printable = (text) =>
  String(text).replace(
    /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cs}]/gu,
    (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`,
  );

/** Return a sentence of gpumap with its commands and values marked. */
export const prose = (text) =>
  printable(text)
    .split("`")
    .map((part, index) => (index % 2 ? h("code", {}, part) : part));

/** Return a foreign text in an element that isolates its direction. */
export const name = (text, attributes) => h("bdi", attributes, printable(text));

/** Return a name that gives way in its middle where it has too little room. */
export function cutName(text, kind) {
  const characters = [...printable(text)];
  const end = characters.length > 3 * TAIL ? characters.splice(-TAIL).join("") : null;
  return h("bdi", { class: end ? `${kind} cut` : kind }, end ? [h("span", {}, characters.join("")), h("span", {}, end)] : characters.join(""));
}

export const ownerWord = (owner) => ({ mps_server: "MPS server", sibling: "sibling instance" })[owner] ?? printable(owner);

/** The throttle reasons of clocks. */
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
  push: "collections when the kubelet allocates a device",
  gpm: "GPM metrics (Hopper and later)",
  xid_events: "XID errors",
};
