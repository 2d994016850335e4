// One line for each GPU: memory by owner, utilization, temperature, power, holders and findings. A click on a line opens
// the details.

import { h } from "./dom.js";
import { bar, legend } from "./bar.js";
import { details, freeFor, freeWords, vacancy } from "./devices.js";
import { marks, power } from "./health.js";
import { hasKubelet, modelOf, oneModel, workName } from "./model.js";
import { outOf } from "./parts.js";
import { listedBytes, memoryOf } from "./totals.js";
import { bytes, cutName, known, name, percent, printable } from "./words.js";

const ROOM = 42; // characters of two or three names on a line
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
      ["Used", "Free", "GPU busy", "Temp", "Power"].map(number),
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
    h("span", { class: "number free", title: memory && freeFor(memory, line.devices) }, known(memory?.free_bytes, bytes, why.used)),
    h("span", { class: "number busy" }, busy(gpu, why)),
    h("span", { class: "number" }, known(temperature, (degrees) => `${Math.round(degrees)} °C`, NOT_REPORTED)),
    h("span", { class: "number power" }, known(reading?.power_watts, (watts) => power(watts, reading.power_limit_watts), NOT_REPORTED)),
  ];
}

const NOT_REPORTED = "The GPU does not report it";

const used = ({ used_bytes: now, total_bytes: total }) => outOf(bytes(now), bytes(total));

function busy(gpu, why) {
  const ratio = gpu?.reading?.utilization_ratio ?? null;
  if (ratio === null) return known(null, null, gpu?.partitioned ? "A GPU in MIG mode reports no utilization" : why.sm);
  const meter = h("span", { class: "meter", "aria-hidden": "true" }, h("span", { width: `${100 * ratio}%` }));
  return [meter, h("span", { class: "ratio" }, percent(ratio))];
}

/** Return the first pods that hold a part of the GPU, the number of others, and what is free; without a kubelet, its users. */
function holders(line, context) {
  const free = freeWords(line);
  const migDevices = line.devices.filter((device) => device.mig).length;
  const names = [...new Map(hasKubelet(context.map) ? podsOn(line) : worksOn(line))];
  let room = ROOM;
  const first = names.filter(([, word]) => (room -= Math.min(Math.max(word.length, ROOM / 3), ROOM / 2)) >= 0).map(([title, word]) => h("span", { title: printable(title) }, cutName(word, "pod")));
  return [
    migDevices > 0 && h("span", { class: "of" }, `${migDevices} MIG:`),
    names.length ? h("span", { class: "names" }, first) : h("span", { class: "of" }, vacancy(line, context)),
    names.length > first.length && h("span", { class: "more-names" }, `+${names.length - first.length}`),
    names.length > 0 && free && h("span", { class: "of" }, free),
  ];
}

const podsOn = (line) => line.devices.flatMap((device) => device.holding).map(({ namespace, pod }) => [`${namespace}/${pod}`, pod]);

/** Return the names of work outside pods, the largest memory first. */
function worksOn(line) {
  const uses = line.devices.flatMap((device) => device.host ?? []).filter((use) => workName(use.work));
  return uses.sort((a, b) => (b.memory_bytes ?? 0) - (a.memory_bytes ?? 0)).map((use) => [workName(use.work), workName(use.work)]);
}
