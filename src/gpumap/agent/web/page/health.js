// The sensors of a GPU, and its problems with their remedies. It draws only problems, not the absence of problems.

import { h } from "./dom.js";
import { findingsOf, keyOf } from "./model.js";
import { advice, containerName, findingMark, outOf } from "./parts.js";
import { count, duration, percent, printable, SLOWED } from "./words.js";

const MARKS = 2; // on a line
const HIT = 3; // containers that are named with a code

export const power = (watts, limit) => outOf(`${Math.round(watts)} W`, limit && Math.round(limit));

const megahertz = (hertz) => `${Math.round(hertz / 1e6)} MHz`;

/** Return facts of a GPU that answers: temperature, power, clock and throttle reasons. */
export function sensors(gpu) {
  const reading = gpu?.reading;
  if (!reading) return [];
  const temperature = reading.temperatures_celsius?.gpu ?? null;
  const clocks = reading.clocks_hertz ?? {};
  const clock = clocks.sm ?? clocks.graphics ?? null;
  const all = Object.entries(clocks).map(([domain, hertz]) => `${printable(domain)} ${megahertz(hertz)}`);
  const slow = slowdowns(gpu);
  return [
    temperature !== null && ["temp", `${Math.round(temperature)} °C`],
    reading.power_watts !== undefined && ["power", power(reading.power_watts, reading.power_limit_watts)],
    clock !== null && ["clock", h("span", { title: all.join(", ") }, megahertz(clock))],
    slow.length > 0 && ["slowed by", slow.join(", ")],
  ];
}

/** Return the throttle reasons that slow down work: not idleness, and not limits that an administrator set. */
function slowdowns(gpu) {
  const events = Object.entries(gpu.reading?.clock_events ?? {});
  const active = events.filter(([reason, is]) => is && SLOWED[reason]).map(([reason]) => reason);
  const named = active.filter((reason) => reason !== "hw_slowdown");
  return (named.some((reason) => reason.startsWith("hw_")) ? named : active).map((reason) => SLOWED[reason]);
}

/** Return the GPM values of a leaf, if there are any. */
export function activity(device) {
  const measured = device.activity;
  if (!measured) return null;
  const parts = [
    ["SM", measured.sm_ratio],
    ["warps", measured.sm_occupancy_ratio],
    ["tensor", measured.tensor_ratio],
    ["DRAM", measured.dram_ratio],
    ["engine", measured.graphics_ratio],
    ["FP64", measured.fp64_ratio],
    ["FP32", measured.fp32_ratio],
    ["FP16", measured.fp16_ratio],
  ].filter(([, ratio]) => typeof ratio === "number");
  const text = parts.map(([part, ratio]) => `${part}\u00a0${percent(ratio)}`).join(" · ");
  return parts.length > 0 && ["active", h("span", { title: ACTIVITY }, text)];
}

const ACTIVITY =
  "Mean over the last interval: busy SMs; warps on them, as a share of their maximum; busy tensor cores; " +
  "used memory bandwidth; time in which any engine was busy; busy FP64, FP32 and FP16 pipes";

/** Return a mark for each kind of finding of a GPU, the worst first, and for its XID errors and throttle reasons. Fatal XID errors are next to the fault. */
export function marks({ uuid, gpu, devices }, map) {
  const uuids = new Set([uuid, ...devices.map((device) => device.uuid)]);
  const numbers = new Map();
  for (const { finding } of findingsOf(map).filter(({ uuid }) => uuids.has(uuid))) numbers.set(finding, (numbers.get(finding) ?? 0) + 1);
  const kinds = [...numbers].map(([kind, number]) => [count(number, kind, kind), findingMark(kind, null, number)]);
  const event = (text, bad, title) => [text, h("span", { key: text, class: bad ? "tag bad" : "tag", title }, text)];
  const xidMarks = (fatal) => (gpu?.xids ?? []).filter((error) => error.fatal === fatal).map(({ code, words }) => event(`XID ${code}`, fatal, words));
  const all = [...kinds, ...xidMarks(false), ...(gpu ? slowdowns(gpu) : []).map((cause) => event(`slowed by ${cause}`))];
  all.splice(numbers.has("fault") ? 1 : 0, 0, ...xidMarks(true));
  const rest = all.slice(MARKS).map(([text]) => text);
  return h(
    "span",
    { class: "marks" },
    all.slice(0, MARKS).map(([, mark]) => mark),
    rest.length > 0 && h("span", { key: "rest", class: "tag", title: rest.join(", ") }, `+${rest.length}`),
  );
}

/** Return the worst fault of a GPU, with its remedy, and its errors; null without any. */
export function problems(gpu, map) {
  const lines = gpu ? [...gpu.faults.map(fault), ecc(gpu), ...xids(gpu, map)].filter(Boolean) : [];
  return lines.length ? h("ul", { class: "ills" }, lines) : null;
}

const fault = (finding) => h("li", { key: finding.reason, class: "bad" }, `This GPU ${printable(finding.why)}.`, advice(finding.remedy));

const error = (key, text) => h("li", { key, class: "warn" }, text);

function ecc(gpu) {
  const lost = Object.entries(gpu.reading?.ecc_errors?.uncorrected ?? {}).filter(([, errors]) => errors);
  const all = lost.reduce((sum, [, errors]) => sum + errors, 0);
  const where = lost.map(([location, errors]) => `${printable(location)} ${errors}`).join(", ");
  return all > 0 && error("ecc", `${count(all, "memory error")} over its life were not correctable: ${where}.`);
}

/** Return one line for each code, with the containers that held or used the GPU or a part of it at that time. */
function xids(gpu, map) {
  const parts = new Set([gpu.uuid, ...map.devices.filter((device) => device.gpu_uuid === gpu.uuid).map((device) => device.uuid)]);
  const containers = (map.container_xids ?? []).filter((row) => parts.has(row.uuid));
  return gpu.xids.map(({ code, errors, words, fatal, timestamp }) => {
    const names = new Map(containers.filter((row) => String(row.code) === code).map((row) => [keyOf(row), row]));
    const first = [...names.values()].slice(0, HIT).map((row, index) => [index ? ", " : ", while held or used by ", containerName(row)]);
    const more = names.size > HIT ? ` and ${names.size - HIT} more` : "";
    const times = errors > 1 ? `, ${errors} times` : "";
    const when = timestamp ? `, ${times ? "last " : ""}${duration(map.timestamp - timestamp)} ago` : "";
    return error(`xid ${code}`, [fatal ? `XID ${code}` : words, times, when, first, more, "."]);
  });
}
