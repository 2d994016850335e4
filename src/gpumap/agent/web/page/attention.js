// The list of problems, worst first: faults with their remedies, then waste in the order of `gpumap waste`.

import { h } from "./dom.js";
import { wish } from "./health.js";
import { addressOf } from "./model.js";
import { containerName, findingMark } from "./parts.js";
import { downGpus } from "./totals.js";
import { bytes, duration, FAULTS, printable, prose } from "./words.js";

const SHOWN = 5; // before one asks for the rest

/** The list: `broken` are the lines of `faults`. */
export function attention(map, devices, broken, state) {
  const rows = [...broken, ...findings(map, devices)];
  const all = state.all || rows.length <= SHOWN + 1;
  return [
    h(
      "div",
      { class: "title" },
      h("h2", {}, "Needs attention", rows.length > 0 && h("span", { class: "of" }, ` ${rows.length}`)),
      rows.length > SHOWN + 1 &&
        h(
          "button",
          { type: "button", class: "more", "data-all": "", "aria-expanded": String(all) },
          all ? `Show the first ${SHOWN}` : `Show all ${rows.length}`,
        ),
      map.unjudged?.length > 0 && unjudged(map.unjudged),
    ),
    rows.length ? h("ol", {}, all ? rows : rows.slice(0, SHOWN)) : h("p", { class: "nobody" }, allIsWell(map)),
  ];
}

const allIsWell = (map) =>
  !map.findings
    ? "The waste is not known."
    : map.unjudged.length
      ? "The known data shows no fault and no waste."
      : "No fault and no waste.";

const unjudged = (sentences) =>
  h(
    "details",
    { class: "unjudged" },
    h("summary", {}, "What gpumap could not check"),
    h("ul", {}, sentences.map((sentence) => h("li", {}, prose(sentence)))),
  );

// --- what is broken --------------------------------------------------------------------------------------------------

/** Return the lines of faults. `old` is the reason why there is no current data, if there is none. */
export function faults(map, devices, old) {
  const gpuName = (gpu) => `GPU ${gpu.index}`;
  const asks = (gpu) => fault(`ill ${gpu.uuid}`, gpuName(gpu), `#${gpu.uuid}`, `answers and needs recovery: ${wish(gpu)}`, gpu.remedies.recovery_action);
  const remap = (gpu) => {
    const which = gpu.reading.row_remap_failure ? "row_remap_failure" : "row_remap_pending";
    return fault(`rows ${gpu.uuid}`, gpuName(gpu), `#${gpu.uuid}`, "bad rows in its memory", gpu.remedies[which]);
  };
  const up = map.gpus.filter((gpu) => !gpu.fault);
  return [
    ...(old ? [fault("old", "No current data", null, old, null)] : []),
    ...map.sources.filter((one) => !one.up).map((one) => sourceDown(one, map)),
    ...downGpus(map).map((gpu) =>
      fault(
        `gpu ${gpu.uuid ?? gpu.index}`,
        gpuName(gpu),
        gpu.uuid && `#${gpu.uuid}`,
        `down (${gpu.fault}): it ${FAULTS[gpu.fault] ?? "is not usable"}${gpu.uuid ? "" : ", and has not reported its uuid"}`,
        gpu.remedies?.fault ?? gpu.remedy,
      ),
    ),
    ...up.filter(wish).map(asks),
    ...up.filter((gpu) => gpu.reading.row_remap_failure || gpu.reading.row_remap_pending).map(remap),
    ...blind(map),
    ...(old ? [] : empty(map, devices)),
  ];
}

function sourceDown(source, map) {
  const since = source.last_success ? `last answered ${duration(map.timestamp - source.last_success)} before` : "never answered";
  const why = `${source.reason || "no answer"}${source.detail ? `: ${source.detail}` : ""}, ${since}`;
  return fault(`source ${source.source}`, `${source.source} is down`, "#health", why, source.remedy);
}

const blind = (map) =>
  map.capabilities.pid_visibility === false && map.sources.find((one) => one.source === "procfs")?.up
    ? [
        fault(
          "pids",
          "Processes of other containers are not visible",
          "#health",
          "the use of each container is not known",
          map.remedies?.pid_visibility ?? "Run gpumap with hostPID: true.",
        ),
      ]
    : [];

const empty = (map, devices) =>
  !devices.length && !map.nameless_gpus.length && map.sources.find((one) => one.source === "nvml")?.up
    ? [fault("none", "No device", null, "NVML lists no GPU on this node", null)]
    : [];

const fault = (key, subject, href, why, remedy) =>
  h(
    "li",
    { key, class: "fault" },
    h("span", { class: "mark-finding is-fault" }, "fault"),
    h("span", { class: "what" }, href ? h("a", { href }, printable(subject)) : printable(subject)),
    h("span", { class: "because" }, printable(why.charAt(0).toUpperCase() + why.slice(1)), ".", remedy ? h("span", { class: "remedy" }, " ", prose(remedy)) : null),
  );

// --- what is wasted --------------------------------------------------------------------------------------------------

function findings(map, devices) {
  const names = new Map(devices.filter((device) => !device.bare).map((device) => [device.uuid, gpuOf(device)]));
  return (map.findings ?? []).map((one) => finding(one, names.get(one.uuid) ?? null));
}

const gpuOf = (device) => {
  const gpu = device.index === null || device.index === undefined ? "GPU ?" : `GPU ${device.index}`;
  return device.mig ? `${gpu} ${device.mig.gpu_instance_id}/${device.mig.compute_instance_id}` : gpu;
};

/** Return a line that links to its row on the device. */
function finding(one, gpu) {
  const row = addressOf({ ...one, owner: one.finding === "leftover" ? "gone" : "" });
  const href = one.uuid ? `#${one.uuid}&${new URLSearchParams({ row })}` : null;
  const who = containerName(one) ?? "a deleted pod";
  return h(
    "li",
    { key: `${one.finding} ${one.uuid} ${row} ${one.why}` },
    findingMark(one.finding),
    h("span", { class: "what" }, href ? h("a", { href }, who) : who),
    h("span", { class: "gpu-name" }, gpu),
    h("span", { class: "wasted number" }, one.waste_bytes === null ? null : h("span", { title: WASTE[one.finding] }, bytes(one.waste_bytes))),
    h("span", { class: "because" }, printable(one.why), one.remedy ? h("span", { class: "advice", title: printable(one.remedy) }, " ", prose(one.remedy)) : null),
  );
}

const WASTE = {
  squatter: "Used memory without a grant",
  leftover: "Memory still in use",
  over: "Used memory above the grant",
  idle: "Granted memory that is not used",
  unused: "Granted memory that is not used",
};
