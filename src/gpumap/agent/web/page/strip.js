// One line for each GPU: memory by owner, utilization, temperature, power, holders and findings. A click on a line opens
// the details.

import { h } from "./dom.js";
import { bar, legend } from "./bar.js";
import { details, vacancy } from "./devices.js";
import { marks, power } from "./health.js";
import { hasKubelet, keyOf, modelOf, oneModel, workName } from "./model.js";
import { outOf } from "./parts.js";
import { listedBytes } from "./totals.js";
import { bytes, known, name, percent, printable } from "./words.js";

const NAMED = 3; // holders, or work outside pods, on a line
const FEW = 2; // GPUs that are open from the start

/** Return whether to show the details of a GPU: if the reader opened it or filters, or if there are few GPUs. */
function isOpen(line, { state, all }) {
  const opened = line.devices.some((device) => state.opened.get(device.uuid));
  return state.opened.get(line.uuid) ?? (opened || state.query !== "" || all.length <= FEW);
}

export function strip(lines, context) {
  const rows = lines.flatMap((line) => line.devices.flatMap((device) => device.rows));
  const some = (test) => lines.some((line) => line.devices.some(test));
  const differ = oneModel(context.map.gpus) === null;
  const number = (title) => h("span", { class: "number" }, title);
  return [
    h(
      "div",
      { key: "head", class: `line head${differ ? " models" : ""}`, "aria-hidden": "true" },
      h("span", {}, "GPU"),
      differ && h("span", {}, "Model"),
      h("span", {}, "Memory by owner"),
      ["Used", "GPU busy", "Temp", "Power"].map(number),
      h("span", {}, hasKubelet(context.map) ? "Held by" : "Used by"),
    ),
    lines.map((line) => section(line, context, differ)),
    h(
      "div",
      { key: "legend" },
      legend(rows, {
        reserved: some((device) => device.memory?.reserved_bytes > 0),
        granted: some((device) => device.holding.some((row) => row.grant.memory_bytes > 0)),
      }),
    ),
  ];
}

function section(line, context, differ) {
  const { gpu } = line;
  const open = isOpen(line, context);
  const down = Boolean(gpu?.fault);
  const title = line.index === null || line.index === undefined ? "GPU ?" : `GPU ${line.index}`;
  return h(
    "section",
    {
      key: line.uuid,
      id: line.uuid,
      class: `gpu${down ? " down" : ""}${open ? " open" : ""}`,
      "aria-label": title,
      "aria-current": context.state.device === line.uuid && !context.state.row ? "true" : null,
      tabindex: -1,
    },
    h(
      "div",
      { class: `line${differ ? " models" : ""}` },
      h("h2", {}, h("button", { type: "button", "data-toggle": line.uuid, "aria-expanded": String(open) }, title)),
      differ && name(modelOf(gpu), { class: "model", title: printable(modelOf(gpu)) }),
      down
        ? h("span", { class: "tag bad" }, `down: ${printable(gpu.fault)}`)
        : numbers(line, context),
      h("span", { class: "held" }, holders(line, context), marks(line, context.map)),
    ),
    open ? details(line, context) : null,
  );
}

function numbers(line, context) {
  const { gpu } = line;
  const memory = memoryOf(line);
  const listed = line.devices.length === 1 ? listedBytes(line.devices[0]) : null;
  const why = context.why(line.devices[0], {});
  const all = {
    memory,
    rows: line.devices.flatMap((device) => device.allRows ?? device.rows),
    holding: line.devices.flatMap((device) => device.holding),
  };
  const reading = gpu?.reading;
  const temperature = reading?.temperatures_celsius?.gpu;
  return [
    memory ? bar(all) : h("span", { class: "bar" }),
    h("span", { class: "number used" }, memory || listed === null ? known(memory, used, why.used) : bytes(listed)),
    h("span", { class: "number busy" }, busy(gpu, why)),
    h("span", { class: "number" }, known(temperature, (degrees) => `${Math.round(degrees)} °C`, NOT_REPORTED)),
    h("span", { class: "number power" }, known(reading?.power_watts, (watts) => power(watts, reading.power_limit_watts), NOT_REPORTED)),
  ];
}

const NOT_REPORTED = "The GPU does not report it";

/** Return the memory of the whole GPU. */
const memoryOf = (line) => line.gpu?.reading?.memory ?? (line.devices.length === 1 ? line.devices[0].memory : null);

const used = ({ used_bytes: now, total_bytes: total }) => outOf(bytes(now), bytes(total));

function busy(gpu, why) {
  const ratio = gpu?.reading?.utilization_ratio ?? null;
  if (ratio === null) return known(null, null, gpu?.partitioned ? "A GPU in MIG mode reports no utilization" : why.sm);
  const meter = h("span", { class: "meter", "aria-hidden": "true" }, h("span", { width: `${100 * ratio}%` }));
  return [meter, h("span", { class: "ratio" }, percent(ratio))];
}

/** Return the first containers that hold a part of the GPU, and the number of others; without a kubelet, its users. */
function holders(line, context) {
  const found = hasKubelet(context.map) ? holdersOf(line) : worksOn(line);
  if (!found.length) return h("span", { class: "of" }, vacancy(line, context));
  const first = found.slice(0, NAMED);
  const names = first.map(([word, title], at) => [at ? ", " : "", name(word, { class: "pod", title: printable(title) })]);
  const more = found.length - first.length;
  return [h("span", { class: "names" }, names), more > 0 && h("span", { class: "more-names" }, `+${more}`)];
}

const holdersOf = (line) => {
  const found = new Map(line.devices.flatMap((device) => device.holding).map((row) => [keyOf(row), row]));
  return [...found.values()].map((row) => [row.pod, `${row.namespace}/${row.pod}`]);
};

/** Return the names of work outside pods, the largest memory first. */
const worksOn = (line) => {
  const uses = line.devices.flatMap((device) => device.host ?? []).filter((use) => workName(use.work));
  uses.sort((one, other) => (other.memory_bytes ?? 0) - (one.memory_bytes ?? 0));
  return [...new Set(uses.map((use) => workName(use.work)))].map((word) => [word, word]);
};
