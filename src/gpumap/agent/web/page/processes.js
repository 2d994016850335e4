// The view of processes: all processes of NVML, with their owners.

import { h } from "./dom.js";
import { PROCESSES_BY, sorted } from "./model.js";
import { cell, deviceName, ownerMark, podName, table } from "./parts.js";
import { bytes, known, name, percent, printable } from "./words.js";

export const COLUMNS = [
  { id: "pid", title: "PID", number: true },
  { id: "type", title: "Type", hint: "C: compute, G: graphics, M: MPS client" },
  { id: "command", title: "Command" },
  { id: "device", title: "Device" },
  { id: "owner", title: "Owner" },
  { id: "name", title: "Container" },
  { id: "used", title: "Memory", number: true },
  { id: "sm", title: "SM", number: true },
];

export function processesView(processes, context) {
  if (!processes.length)
    return h("p", { class: "empty" }, context.state.query ? "No process matches the filter." : "NVML lists no process.");
  const rows = sorted(processes, context.state.sort, PROCESSES_BY);
  return h(
    "section",
    { class: "processes", "aria-label": "Processes" },
    h("h2", {}, "Processes"),
    table("Processes", COLUMNS, context.state.sort, rows.map((process) => processRow(process, context))),
  );
}

function processRow(process, context) {
  const why = context.why(process.device, process);
  return h(
    "tr",
    { key: process.key, class: `is-${process.owner}` },
    h("th", { scope: "row", class: "number", "data-label": "PID" }, process.pid),
    cell("Type", false, printable(process.type)),
    cell(
      "Command",
      false,
      known(process.comm || null, (text) => name(text, { class: "command" }), "The process ended, or /proc does not show it"),
    ),
    cell(
      "Device",
      false,
      h("a", { href: `#${process.device.uuid}`, title: printable(process.device.uuid) }, deviceName(process.device)),
    ),
    cell("Owner", false, ownerMark(process.owner)),
    cell(
      "Container",
      false,
      podName(process) ?? (process.owner === "host" ? "" : known(null, null, why.owner)),
      process.work && [" ", name(process.work, { class: "name" })],
    ),
    cell("Memory", true, known(process.used, bytes, why.used)),
    cell("SM", true, known(process.sm, percent, why.sm)),
  );
}
