// Parts of several views: container names, owner marks, table heads that sort, and device names.

import { h } from "./dom.js";
import { cutName, name, ownerWord, printable, prose } from "./words.js";

export function containerName(row) {
  if (!row.pod) return null;
  const full = `${row.namespace}/${row.pod}${row.container ? ` ${row.container}` : ""}`;
  return h(
    "span",
    { class: "name", title: printable(full) },
    h("span", { class: "ns" }, name(row.namespace), "/"),
    cutName(row.pod, "pod"),
    row.container ? [" ", name(row.container, { class: "container" })] : null,
  );
}

/** Return the name of a row's container, or the UID of its pod; null if both are unknown. */
export const podName = (row) => containerName(row) ?? (row.pod_uid ? h("span", { class: "name" }, "pod ", name(row.pod_uid)) : null);

/** Return what to do, after a sentence; null if there is nothing. */
export const remedy = (text) => (text ? h("span", { class: "remedy" }, " ", prose(text)) : null);

/** Return what to do, without the first sentence: it says what is wrong, as the finding does. */
export const advice = (text) => remedy(text?.replace(/^.*?\. (?=[A-Z])/, ""));

/** Return a value with its limit, if that is known. */
export const outOf = (value, limit) => [value, limit ? h("span", { class: "of" }, ` / ${limit}`) : null];

export const ownerMark = (owner) => h("span", { class: `mark-owner is-${owner}` }, ownerWord(owner));

/** Return the mark of a finding. With `href` it is a link to the device or to all findings. */
export const findingMark = (kind, href, number) =>
  h(
    href ? "a" : "span",
    { key: kind, class: `mark-finding is-${kind}`, href },
    number > 1 ? `${number} ${kind.replace("_", " ")}` : kind.replace("_", " "),
  );

/** Return a table that sorts by its heads. */
export const table = (label, columns, order, rows) =>
  h("div", { class: "scroll" }, h("table", { "aria-label": label }, head(columns, order), h("tbody", {}, rows)));

function head(columns, order) {
  const by = order.replace("-", "");
  const cells = columns.map(({ id, title, number, hint }) =>
    h(
      "th",
      {
        key: id,
        scope: "col",
        class: number ? "number" : null,
        "aria-sort": id === by ? (order.startsWith("-") ? "descending" : "ascending") : null,
      },
      h("button", { type: "button", "data-sort": id, title: hint }, title),
    ),
  );
  return h("thead", {}, h("tr", {}, cells));
}

/** Return the button that shows all of a list, or only its `first` ones. */
export const more = (attributes, all, first, number) =>
  h(
    "button",
    { type: "button", class: "more", "aria-expanded": String(all), ...attributes },
    all ? `Show the first ${first}` : `Show all ${number}`,
  );

export const cell = (label, number, ...children) =>
  h("td", { "data-label": label, class: number ? "number" : null }, children);

export function deviceName(device) {
  if (device.index === null || device.index === undefined) return "GPU ?";
  if (device.partitioned) return `GPU ${device.index} whole`;
  if (!device.mig) return `GPU ${device.index}`;
  return `GPU ${device.index} MIG ${device.mig.gpu_instance_id}/${device.mig.compute_instance_id}`;
}
