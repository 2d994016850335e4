// The details of a GPU: its memory, its curves, its holders and its users.

import { h } from "./dom.js";
import { addressOf, BY, hasKubelet, keyOf, modelOf, sorted } from "./model.js";
import { advice, cell, containerName, deviceName, findingMark, more, outOf, ownerMark, podName, table } from "./parts.js";
import { bar } from "./bar.js";
import { activity, problems, sensors } from "./health.js";
import { listedBytes } from "./totals.js";
import { bytes, clock, count, duration, known, moment, name, ownerWord, percent, printable, share } from "./words.js";

const NAMED = 3; // holders of a whole GPU, at each of its instances
const ROWS = 12; // of a device's table, before one asks for the rest

/** Orders without a column. */
export const ORDERS = [
  { id: "attention", title: "Attention first" },
  { id: "waste", title: "Largest waste first", number: true },
];

export const COLUMNS = [
  { id: "name", title: "Container" },
  { id: "slots", title: "Slots", number: true, hint: "Number of slots that the kubelet assigned" },
  { id: "gpus", title: "GPUs", number: true, hint: "Share of a physical GPU" },
  { id: "granted", title: "Granted", number: true, hint: "Granted memory" },
  { id: "used", title: "Used", number: true, hint: "Used memory now; the curve: last hour, maximum of 30 s" },
  { id: "peak", title: "Peak", number: true, hint: "Highest used memory since gpumap first saw the container" },
  { id: "sm", title: "SM", number: true, hint: "SM time now; the curve: last hour, mean of 30 s" },
  { id: "last", title: "Active", number: true, hint: "Last use of SMs, or the time when gpumap first saw the container" },
];

/** Return the details of a GPU: its sensors, its problems, and each of its devices with its containers. */
export function details(line, context) {
  const { gpu } = line;
  const [first] = line.devices;
  const parts = gpu?.partitioned || line.devices.length > 1;
  return h(
    "div",
    { class: "details" },
    gpu?.fault && h("p", { class: "why" }, downText(gpu, context)),
    !gpu && h("p", { class: "why" }, "The kubelet lists this device, but NVML does not."),
    problems(gpu, context.map),
    h(
      "div",
      { class: "side" },
      facts([...(gpu?.model ? [["model", modelOf(gpu)]] : []), ...(parts ? [["", "partitioned (MIG)"]] : memoryFacts(first)), ...sensors(gpu)]),
      curvesOf(parts ? null : first, context),
      uuidOf(line.uuid),
    ),
    first.bare
      ? h("p", { class: "why" }, "This GPU has no MIG device, so the kubelet cannot assign it.")
      : line.devices.map((device) => (parts ? part(device, context) : containers(device, context))),
  );
}

const downText = (gpu, context) => [
  "Only the assignments of this GPU are known.",
  gpu.last_success ? ` It last answered ${duration(context.map.timestamp - gpu.last_success)} before this data.` : "",
];

/** Return a MIG device, or a partitioned GPU that was assigned as a whole. */
function part(device, context) {
  const holders = device.whole.slice(0, NAMED).map((row, index) => [index ? ", " : "", containerName(row)]);
  const others = device.whole.length - NAMED;
  return h(
    "section",
    {
      key: device.uuid,
      id: device.partitioned ? null : device.uuid,
      class: "part",
      "aria-label": deviceName(device),
      "aria-current": context.state.device === device.uuid && !device.partitioned && !context.state.row ? "true" : null,
      tabindex: -1,
    },
    h(
      "div",
      { class: "title" },
      h("h3", {}, h("a", { href: `#${device.uuid}`, title: "Link to this device" }, deviceName(device))),
      device.mig && h("span", { class: "tag" }, printable(device.mig.profile)),
      !device.partitioned && uuidOf(device.uuid),
    ),
    device.whole.length > 0 && h("p", { class: "why" }, "Held with the whole GPU by ", holders, others > 0 && ` and ${others} more`, "."),
    device.memory && [
      bar({ memory: device.memory, holding: device.holding, rows: device.allRows ?? device.rows }),
      h("div", { class: "side" }, facts(memoryFacts(device)), curvesOf(device, context)),
    ],
    containers(device, context),
  );
}

const uuidOf = (uuid) =>
  h("button", { type: "button", class: "uuid", "data-copy": uuid, title: "Copy the uuid" }, printable(uuid));

/** Return memory and activity of a device, with the memory that no process explains. */
function memoryFacts(device) {
  if (!device.memory) {
    const listed = listedBytes(device);
    return [listed !== null && ["used by processes", h("span", { title: UNIFIED }, bytes(listed))], activity(device)];
  }
  const { used_bytes: used, total_bytes: total, reserved_bytes: reserved } = device.memory;
  const granted = device.holding.map((row) => row.grant.memory_bytes).filter((bytesGranted) => bytesGranted !== null);
  const rest = device.owners.get("unaccounted")?.memory_bytes;
  return [
    ["used", outOf(bytes(used), bytes(total))],
    ["free", freeFor(device.memory, [device])],
    granted.length > 0 && ["granted", bytes(granted.reduce((sum, bytesGranted) => sum + bytesGranted, 0))],
    reserved && ["reserved", bytes(reserved)],
    rest && ["unaccounted", h("span", { title: rest < 0 ? SHARED : REST }, bytes(rest))],
    activity(device),
  ];
}

const UNIFIED = "The device does not report its own memory, such as one that shares the machine's";
const REST = "Memory that no process explains: used by the driver, or by processes without reported memory";
const SHARED = "Negative: processes share memory, and each reports all of it";

function curvesOf(device, context) {
  if (!device?.memory) return null;
  const { curves } = context;
  const curve = (title, kind, drawing) => drawing && h("figure", {}, drawing, h("figcaption", { class: "of" }, `${title}, ${curves.of(kind)}`));
  return h(
    "div",
    { class: "curves" },
    curve("memory", "maximum", curves.memory(device.uuid, null, { most: device.memory.total_bytes })),
    device.mig ? null : curve("GPU busy", "mean", curves.sm(device.uuid, null, "GPU utilization")),
  );
}

/** Return the free memory of some devices, and which containers share it. */
export function freeFor(memory, devices) {
  const holders = new Map(devices.flatMap((device) => [...device.holding, ...device.whole]).map((row) => [keyOf(row), row]));
  const [first] = holders.values();
  const sharing = holders.size > 1 ? `, shared by ${holders.size}` : first ? `, granted to ${printable(first.pod)}` : "";
  return `${bytes(memory.free_bytes)}${sharing}`;
}

/** Return which part of a GPU a new pod could be given; empty if none, or if it is not known. */
export function freeWords(line) {
  const ratios = line.devices.map((device) => device.free_ratio).filter(Boolean);
  const number = ratios.filter((ratio) => ratio === 1).length;
  return [number && (line.devices.length > 1 ? `${number} free` : "free"), ...ratios.filter((ratio) => ratio < 1).map((ratio) => `${percent(ratio)} free`)].filter(Boolean).join(", ");
}

const HINDRANCES = ["fault", "not_offered", "squatter", "leftover", "unexplained"];

/** Return the text for a GPU without a known holder. */
export function vacancy(line, context) {
  if (line.devices[0].bare) return "no MIG device";
  if (!hasKubelet(context.map)) {
    if (line.devices.some((device) => device.processes.length > 0)) return "in use";
    return line.devices.every((device) => usesKnown(device, context)) ? "not in use" : "use not known";
  }
  const reasons = [...new Set(line.devices.map((device) => device.not_free_reason).filter(Boolean))];
  const words = reasons.map((reason) => (HINDRANCES.includes(reason) ? reason.replace("_", " ") : `used by ${ownerWord(reason)}`));
  const texts = [freeWords(line), ...(words.length ? ["not held", ...words] : [])].filter(Boolean);
  return texts.length ? texts.join(", ") : known(null, null, "Its holders or its processes are not known");
}

const usesKnown = (device, { map }) => device.owners.size > 0 && map.capabilities.pid_visibility;

const facts = (pairs) =>
  h(
    "dl",
    { class: "facts" },
    pairs.filter(Boolean).map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))),
  );

function containers(device, context) {
  const { state } = context;
  const rows = sorted(device.rows.filter((row) => row.owner !== "unaccounted"), state.sort, BY);
  if (!rows.length && device.whole.length) return null;
  if (!rows.length) {
    const uses = !usesKnown(device, context) ? "Its use is not known." : "No known use.";
    const isUnheld = !hasKubelet(context.map) || (device.holders === 0 && !device.may_have_more);
    return h("p", { class: "empty" }, `${isUnheld ? "No container holds it." : "Its holders are not known."} ${uses}`);
  }
  const all = state.open.has(device.uuid) || device.narrowed || rows.length <= ROWS + 2;
  const visibleRows = all ? rows : rows.slice(0, ROWS);
  return [
    table(
      `Containers on ${deviceName(device)}`,
      COLUMNS,
      state.sort,
      visibleRows.map((row) => (row.kind === "rest" ? restRow(row, device, context) : containerRow(row, device, context))),
    ),
    rows.length > ROWS + 2 && !device.narrowed && more({ "data-open": device.uuid }, all, ROWS, rows.length),
  ];
}

function containerRow(row, device, context) {
  const why = context.why(device, row);
  return h(
    "tr",
    { key: row.key, class: `is-${row.owner}`, tabindex: -1, "aria-current": isCurrent(row, device, context) },
    h(
      "th",
      { scope: "row" },
      swatch(row),
      containerName(row),
      row.owner === "assigned" || row.finding ? null : [" ", ownerMark(row.owner)],
      remark(row, isCurrent(row, device, context)),
    ),
    cell(
      "Slots",
      true,
      row.slots === null
        ? row.owner === "unassigned"
          ? "0"
          : row.whole
            ? h("span", { title: why.held }, "whole")
            : known(null, null, why.held)
        : h("span", { title: slotsTitle(row) }, row.slots.join("+") || "0"),
    ),
    cell("GPUs", true, row.owner === "unassigned" ? "0" : known(row.gpus, share, why.gpus)),
    cell("Granted", true, row.owner === "unassigned" ? "0" : known(row.granted, bytes, why.granted)),
    cell(
      "Used",
      true,
      context.curves.memory(device.uuid, row, { most: 0, granted: row.granted }),
      value(known(row.used, bytes, why.used)),
    ),
    cell("Peak", true, known(row.peak, bytes, why.used)),
    cell("SM", true, context.curves.sm(device.uuid, row), value(known(row.sm, percent, why.sm))),
    cell("Active", true, known(row.last, (last) => lastUse(last, row, context), why.sm)),
  );
}

const lastUse = (last, row, { map }) =>
  row.sm > 0 ? "now" : h("span", { title: moment(last) }, duration(map.timestamp - last));

const value = (text) => h("span", { class: "value" }, text);

const swatch = (row) => h("span", { class: `swatch ${row.tint ?? ""}`, "aria-hidden": "true" });

const noted = (text, title) => h("span", { class: "remark", title }, ` · ${text}`);

const slotsTitle = (row) => printable(Object.entries(row.grant.slots).map(([resource, slots]) => `${slots} × ${resource}`).join(", "));

const isCurrent = (row, device, { state }) =>
  state.device === device.uuid && state.row === addressOf(row) ? "true" : null;

/** Return the finding of a row, with a link to all findings; for the selected row also the remedy. */
function remark(row, current) {
  const { finding } = row;
  if (row.grant?.reservation) return noted("reservation");
  if (!finding) return row.grant && row.use?.processes === 0 ? noted("no process") : null;
  return [
    " ",
    findingMark(finding.finding, "#attention"),
    noted(`${printable(finding.why)}, since ${clock(finding.since)}`, moment(finding.since)),
    current && advice(finding.remedy),
  ];
}

function restRow(row, device, context) {
  const why = context.why(device, row);
  const commands = [...new Set(row.processes.map((process) => process.comm).filter(Boolean))];
  const named = commands.slice(0, 4).map(printable).join(", ") + (commands.length > 4 ? ", …" : "");
  const counted = count(row.processes.length, "process", "processes");
  const processes = row.processes.length ? (named ? `${counted}: ${named}` : counted) : null;
  return h(
    "tr",
    { key: row.key, class: `rest is-${row.owner}`, tabindex: -1, "aria-current": isCurrent(row, device, context) },
    h(
      "th",
      { scope: "row", colspan: 4 },
      swatch(row),
      podName(row) ?? (row.work ? name(row.work, { class: "name" }) : null),
      row.finding ? remark(row, isCurrent(row, device, context)) : [" ", ownerMark(row.owner), processes && noted(processes)],
    ),
    cell("Used", true, value(known(row.used, bytes, why.used))),
    cell("", true),
    row.processes.length ? cell("SM", true, value(known(row.sm, percent, why.sm))) : cell("", true),
    cell("", true),
  );
}
