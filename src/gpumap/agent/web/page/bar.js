// Memory as a bar: one segment for each user and for reserved memory, and the granted memory below it.

import { h } from "./dom.js";
import { isGranted } from "./model.js";
import { bytes, ownerWord, printable } from "./words.js";

const SEGMENTS = 24;
const userWord = (owner) => ({ unassigned: "squatter", gone: "leftover" })[owner] ?? ownerWord(owner); // the finding's word
const NAMED_FROM = 0.14; // of the bar: room for a name

/** `rows` are those of the device, or of all devices of a GPU. */
export function bar({ memory, holding, rows: all }) {
  const { total_bytes: total, reserved_bytes: reserved, used_bytes: used } = memory;
  const rows = all.filter((row) => row.used > 0).sort((a, b) => order(a) - order(b) || b.used - a.used);
  const few = rows.slice(0, SEGMENTS);
  const rest = rows.slice(SEGMENTS).reduce((sum, row) => sum + row.used, 0);
  const sum = rows.reduce((bytesUsed, row) => bytesUsed + row.used, 0);
  const barBytes = Math.max(total, sum + (reserved ?? 0)) || 1;
  const granted = holding.reduce((bytesGranted, row) => bytesGranted + (row.grant.memory_bytes ?? 0), 0);
  const grants = granted > total ? "all granted, to several containers" : `${bytes(granted)} granted`;
  const width = (value) => `${((100 * value) / barBytes).toFixed(2)}%`;
  const part = (key, kind, value, title) => value > 0 && h("span", { key, class: `segment ${kind}`, width: width(value), title });
  const segments = few.map((row, index) => {
    const label = `${row.pod ? `${row.namespace}/${row.pod}` : row.work || userWord(row.owner)} ${bytes(row.used)}`;
    return h(
      "span",
      { key: `${index} ${row.key}`, class: `segment ${row.tint}`, width: width(row.used), title: printable(label) },
      row.used / barBytes > NAMED_FROM ? h("bdi", {}, printable(row.pod || row.work || userWord(row.owner))) : null,
    );
  });
  return h(
    "div",
    {
      class: "bar",
      role: "img",
      "aria-label": `Memory: ${bytes(used)} of ${bytes(total)} used${granted ? `, ${grants}` : ""}`,
    },
    h(
      "div",
      { class: "segments" },
      segments,
      part("rest", "many", rest, `${rows.length - SEGMENTS} more: ${bytes(rest)}`),
      part("reserved", "reserved", reserved, `reserved by the driver: ${bytes(reserved)}`),
    ),
    granted > 0 && h("div", { class: "granted", width: width(Math.min(granted, total)), title: grants }),
  );
}

const order = (row) =>
  row.kind === "container" ? (isGranted(row) ? 0 : 1) : row.owner === "unaccounted" ? 3 : 2;

const MARKS = ["unassigned", "gone", "host", "mps_server", "sibling", "unknown", "unaccounted"];

/** Return the legend for the colours that are not next to a name. */
export function legend(rows, { reserved, granted }) {
  const owners = MARKS.filter((owner) => rows.some((row) => row.owner === owner && row.used > 0));
  const mark = (key, kind, words) => h("li", { key }, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), words);
  return h(
    "ul",
    { class: "legend", "aria-label": "Meaning of the memory bars" },
    rows.some((row) => isGranted(row) && row.used > 0) && mark("assigned", "tint-0", "holder (one colour each)"),
    owners.map((owner) => mark(owner, `is-${owner}`, userWord(owner))),
    reserved && mark("reserved", "reserved", "reserved by the driver"),
    granted && mark("granted", "granted", "granted"),
  );
}
