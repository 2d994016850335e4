// The view of devices: each with its memory, its curves, who holds it and who uses it.

import { h } from "./dom.js";
import { BY, sorted } from "./model.js";
import { cell, containerName, deviceName, head, ownerMark } from "./parts.js";
import { bar } from "./bar.js";
import { activity, ills, sensors } from "./health.js";
import { isHeld, isUsed, unsettled } from "./totals.js";
import { bytes, count, duration, FAULTS, known, moment, name, percent, printable, prose, share } from "./words.js";

const NAMED = 3; // holders of a whole GPU, at each of its instances
const ROWS = 12; // of a device's table, before one asks for the rest

export const COLUMNS = [
  { id: "name", title: "Container" },
  { id: "slots", title: "Slots", number: true, hint: "How many slots the kubelet assigned" },
  { id: "gpus", title: "GPUs", number: true, hint: "Share of a physical GPU" },
  { id: "granted", title: "Granted", number: true, hint: "Memory that the assignment grants" },
  { id: "used", title: "Used", number: true, hint: "Memory used now, and in the last hour" },
  { id: "peak", title: "Peak", number: true, hint: "The most memory it used since it was first seen" },
  { id: "sm", title: "SM", number: true, hint: "Time on the multiprocessors, now and in the last hour" },
  { id: "last", title: "Active", number: true, hint: "When it last computed" },
];

/** Sections of devices; those of a partitioned GPU stand below it. */
export function devicesView(devices, context) {
  const sections = [];
  let parent = null;
  for (const device of devices) {
    const gpu = device.gpu?.partitioned && (device.mig_profile || device.parent) ? device.gpu : null;
    if (gpu && gpu !== parent) sections.push(partitioned(gpu, context));
    parent = gpu;
    sections.push(card(device, context));
  }
  return sections;
}

function partitioned(gpu, context) {
  return h(
    "section",
    {
      key: `gpu ${gpu.uuid}`,
      class: "gpu",
      id: gpu.uuid,
      "aria-label": `GPU ${gpu.index}`,
      "aria-current": context.state.device === gpu.uuid ? "true" : null,
    },
    h(
      "div",
      { class: "title" },
      h("h2", {}, h("a", { href: `#${gpu.uuid}` }, `GPU ${gpu.index}`)),
      name(gpu.model, { class: "model" }),
      h("span", { class: "tag" }, "partitioned"),
      uuidOf(gpu.uuid),
    ),
    facts([
      [
        "memory",
        known(
          gpu.memory,
          (memory) => `${bytes(memory.used_bytes)} of ${bytes(memory.total_bytes)}`,
          "The GPU does not tell",
        ),
      ],
      ...sensors(gpu),
    ]),
    ills(gpu, context.map),
  );
}

function card(device, context) {
  const gpu = device.gpu;
  const mig = device.mig_profile;
  const part = mig || device.parent; // it stands below its GPU, which has the uuid of the parent
  const down = gpu && !gpu.up;
  return h(
    "section",
    {
      key: device.uuid,
      id: device.parent ? null : device.uuid,
      class: `device${part ? " mig" : ""}${down ? " down" : ""}`,
      "aria-label": deviceName(device),
      "aria-current": context.state.device === device.uuid && !device.parent ? "true" : null,
    },
    h(
      "div",
      { class: "title" },
      h(part ? "h3" : "h2", {}, h("a", { href: `#${device.uuid}`, title: "Link to this device" }, deviceName(device))),
      mig && h("span", { class: "tag" }, printable(mig)),
      !part && name(device.model ?? "", { class: "model" }),
      down && h("span", { class: "tag bad" }, `down: ${printable(gpu.fault)}`),
      uuidOf(device.uuid),
    ),
    down &&
      h(
        "p",
        { class: "why" },
        `This GPU ${FAULTS[gpu.fault] ?? "is not usable"}. What is known is who was assigned to it.`,
        gpu.last_success
          ? ` It last answered ${duration(context.map.timestamp - gpu.last_success)} before this data.`
          : "",
        gpu.remedy ? h("span", { class: "remedy" }, " ", prose(gpu.remedy)) : null,
      ),
    device.whole.length > 0 &&
      h(
        "p",
        { class: "why" },
        "Held with the whole GPU by ",
        device.whole.slice(0, NAMED).map((row, at) => [at ? ", " : "", containerName(row)]),
        device.whole.length > NAMED && ` and ${device.whole.length - NAMED} more`,
        ".",
      ),
    !gpu && h("p", { class: "why" }, "Only the kubelet names this device; NVML does not."),
    part ? null : ills(gpu, context.map),
    device.memory ? memory(device, context) : null,
    device.bare
      ? h("p", { class: "why" }, "No MIG instance was made on it: nothing of it can be assigned.")
      : table(device, context),
  );
}

const uuidOf = (uuid) =>
  h("button", { type: "button", class: "uuid", "data-copy": uuid, title: "Copy the uuid" }, printable(uuid));

function memory(device, context) {
  const { used_bytes: used, total_bytes: total, reserved_bytes: reserved } = device.memory;
  const gpu = device.gpu;
  const held = device.holders.length;
  return h(
    "div",
    { class: "state" },
    bar(device),
    h(
      "div",
      { class: "side" },
      facts([
        ["used", [bytes(used), h("span", { class: "of" }, ` / ${bytes(total)}`)]],
        reserved && ["reserved", bytes(reserved)],
        !device.mig_profile && ["GPU", known(gpu?.utilization_ratio, percent, "The GPU does not tell its utilisation")],
        activity(device),
        ...(device.mig_profile ? [] : sensors(gpu)),
        held ? ["held by", count(held, "container")] : !isHeld(device) && ["", vacancy(device, context)],
      ]),
      h(
        "div",
        { class: "curves" },
        context.curves.memory(device.uuid, null, { most: total }),
        device.mig_profile ? null : context.curves.sm(device.uuid, null, "GPU utilisation"),
      ),
    ),
  );
}

const HELD = {
  yes: "Nobody holds it.",
  no: "Who holds it is not known now.",
  "not all": "No holder is known: there are slots on no known device.",
};

const holdersKnown = ({ allocationKnown, map }) => (!allocationKnown ? "no" : unsettled(map) ? "not all" : "yes");

const usesKnown = (device, { map }) => Boolean(device.memory) && map.capabilities.pid_visibility;

/** What is said of a device without a known holder. */
function vacancy(device, context) {
  const holders = holdersKnown(context);
  if (holders === "no") return "";
  if (isUsed(device)) return holders === "yes" ? "not held, but in use" : "no holder known, in use";
  return holders === "yes" ? "free" : "no holder known";
}

const facts = (pairs) =>
  h(
    "dl",
    { class: "facts" },
    pairs.filter(Boolean).map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))),
  );

function table(device, context) {
  const { state } = context;
  const rows = sorted(device.rows, state.sort, BY);
  if (!rows.length && device.whole.length) return null;
  if (!rows.length) {
    return h(
      "p",
      { class: "nobody" },
      `${HELD[holdersKnown(context)]} ${usesKnown(device, context) ? "Nobody uses it." : "What uses it is not known."}`,
    );
  }
  if (rows.length === 1 && rows[0].owner === "unaccounted") {
    return h(
      "p",
      { class: "nobody" },
      `No process is listed on it; ${bytes(rows[0].used)} unaccounted: ${context.why(device, rows[0]).unaccounted}.`,
    );
  }
  const all = state.open.has(device.uuid) || device.narrowed || rows.length <= ROWS + 2;
  const shown = all ? rows : rows.slice(0, ROWS);
  return [
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { "aria-label": `Containers on ${deviceName(device)}` },
        head(COLUMNS, state.sort),
        h(
          "tbody",
          {},
          shown.map((row) =>
            row.kind === "rest" ? restRow(row, device, context) : containerRow(row, device, context),
          ),
        ),
      ),
    ),
    rows.length > ROWS + 2 &&
      !device.narrowed &&
      h(
        "button",
        { type: "button", class: "more", "data-open": device.uuid, "aria-expanded": String(all) },
        all ? `Show the first ${ROWS}` : `Show all ${rows.length}`,
      ),
  ];
}

function containerRow(row, device, context) {
  const why = context.why(device, row);
  const { user } = row;
  const charges = context.charges(device, row);
  const charged = (shown) => (charges ? h("span", { title: charges }, shown) : shown);
  return h(
    "tr",
    { key: row.key, class: `is-${row.owner}` },
    h(
      "th",
      { scope: "row" },
      swatch(row),
      containerName(row),
      row.owner === "assigned" ? null : [" ", ownerMark(row.owner)],
      remark(row),
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
    cell("GPUs", true, charged(row.owner === "unassigned" ? "0" : known(row.gpus, share, why.gpus))),
    cell("Granted", true, row.owner === "unassigned" ? "0" : known(row.granted, bytes, why.granted)),
    cell(
      "Used",
      true,
      context.curves.memory(device.uuid, row, { most: 0, granted: row.granted }),
      value(known(row.used, bytes, why.used)),
    ),
    cell("Peak", true, known(row.peak, bytes, why.used)),
    cell("SM", true, context.curves.sm(device.uuid, row), value(known(row.sm, percent, why.sm))),
    cell(
      "Active",
      true,
      known(
        row.last,
        (last) =>
          user.sm_ratio > 0 ? "now" : h("span", { title: moment(last) }, duration(context.map.timestamp - last)),
        why.sm,
      ),
    ),
  );
}

const value = (shown) => h("span", { class: "value" }, shown);

const swatch = (row) => h("span", { class: `swatch ${row.tint ?? ""}`, "aria-hidden": "true" });

const noted = (text) => h("span", { class: "remark" }, ` · ${text}`);

const slotsTitle = (row) => printable(row.holder.slots.map((one) => `${one.slots} × ${one.resource}`).join(", "));

function remark(row) {
  const words = [];
  if (row.over) words.push(`${bytes(row.over)} more than granted`);
  if (row.idle?.seconds) words.push(`holds but idle for ${duration(row.idle.seconds)}`);
  else if (row.idle || (row.holder && row.user?.processes === 0))
    words.push(row.podWorks ? "holds, and another container of its pod works" : "holds, no process");
  return words.length ? noted(words.join(", ")) : null;
}

function restRow(row, device, context) {
  const why = context.why(device, row);
  const commands = [...new Set(row.processes.map((one) => one.name).filter(Boolean))];
  const named = commands.slice(0, 4).map(printable).join(", ") + (commands.length > 4 ? ", …" : "");
  const counted = count(row.processes.length, "process", "processes");
  const processes = row.processes.length ? (named ? `${counted}: ${named}` : counted) : null;
  return h(
    "tr",
    { key: row.key, class: `rest is-${row.owner}` },
    h(
      "th",
      { scope: "row", colspan: 4 },
      swatch(row),
      containerName(row) ?? (row.podUid ? h("span", { class: "name" }, "pod ", name(row.podUid)) : null),
      " ",
      ownerMark(row.owner),
      processes && noted(processes),
      row.owner === "unaccounted" && noted(why.unaccounted),
    ),
    cell("Used", true, value(known(row.used, bytes, why.used))),
    cell("", true),
    row.processes.length ? cell("SM", true, value(known(row.sm, percent, why.sm))) : cell("", true),
    cell("", true),
  );
}
