// A device's memory as a bar: a segment for each that uses it, what is reserved, and below it what was granted.

import { h } from "./dom.js";
import { bytes, OWNERS, printable } from "./words.js";

const SEGMENTS = 24;
const NAMED_FROM = 0.14; // of the bar: room for a name

export function bar(device) {
  const { total_bytes: total, reserved_bytes: reserved, used_bytes: used } = device.memory;
  const rows = (device.allRows ?? device.rows)
    .filter((row) => row.used > 0)
    .sort((a, b) => order(a) - order(b) || b.used - a.used);
  const few = rows.slice(0, SEGMENTS);
  const rest = rows.slice(SEGMENTS).reduce((sum, row) => sum + row.used, 0);
  const sum = rows.reduce((all, row) => all + row.used, 0);
  const whole = Math.max(total, sum + (reserved ?? 0)) || 1;
  const granted = device.holders.reduce((all, row) => all + (row.allocated_memory_bytes ?? 0), 0);
  const grants = granted > total ? "all granted, to several at once" : `${bytes(granted)} granted`;
  const width = (value) => `${((100 * value) / whole).toFixed(2)}%`;
  const segments = few.map((row) => {
    const label = `${row.pod ? `${row.namespace}/${row.pod}` : OWNERS[row.owner]} ${bytes(row.used)}`;
    return h(
      "span",
      { key: row.key, class: `segment ${row.tint}`, width: width(row.used), title: printable(label) },
      row.used / whole > NAMED_FROM ? h("bdi", {}, printable(row.pod || OWNERS[row.owner])) : null,
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
      rest > 0 &&
        h("span", {
          key: "rest",
          class: "segment many",
          width: width(rest),
          title: `${rows.length - SEGMENTS} more: ${bytes(rest)}`,
        }),
      reserved > 0 &&
        h("span", {
          key: "reserved",
          class: "segment reserved",
          width: width(reserved),
          title: `reserved by the driver: ${bytes(reserved)}`,
        }),
    ),
    granted > 0 &&
      h("div", { class: "granted", width: width(Math.min(granted, total)), title: grants }),
  );
}

const order = (row) =>
  row.kind === "container" ? (row.owner === "assigned" ? 0 : 1) : row.owner === "unaccounted" ? 3 : 2;
