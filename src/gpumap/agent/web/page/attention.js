// The list of problems: sources that are down, then the agent's findings in their order, or the largest waste first.

import { h } from "./dom.js";
import { addressOf, filteredFindings, findingsOf, GPU_FINDINGS, sorted, wasteOf } from "./model.js";
import { advice, containerName, deviceName, findingMark, more, remedy } from "./parts.js";
import { bytes, duration, moment, printable, prose } from "./words.js";

const SHOWN = 5; // before one asks for the rest

/** The list. `old` is the reason why there is no current data, if there is none. */
export function attention(map, devices, old, state) {
  const byWaste = state.sort.endsWith("waste");
  const findings = oncePerGpu(filteredFindings(map, devices, state.query));
  const ordered = byWaste ? sorted(findings, state.sort, { waste: wasteOf }) : findings;
  const names = new Map([...map.gpus, ...devices].map((device) => [device.uuid, deviceName(device).replace(/ whole| MIG/, "")]));
  const rows = [...broken(map, old), ...ordered.map((finding, index) => findingRow(finding, names.get(finding.uuid), finding.remedy === ordered[index - 1]?.remedy))];
  const hidden = oncePerGpu(findingsOf(map)).length - ordered.length;
  const all = state.all || rows.length <= SHOWN + 1;
  return [
    h(
      "div",
      { class: "title" },
      h("h2", {}, "Needs attention", (rows.length > 0 || hidden > 0) && h("span", { class: "of" }, ` ${rows.length}${hidden ? ` of ${rows.length + hidden}` : ""}`)),
      rows.length > SHOWN + 1 && more({ "data-all": "" }, all, SHOWN, rows.length),
      ordered.length > 1 &&
        state.view === "devices" &&
        h("button", { type: "button", class: "more", "data-sort": byWaste ? "attention" : "waste" }, byWaste ? "Worst first" : "Largest waste first"),
      map.unjudged_sentences?.length > 0 && unjudged(map.unjudged_sentences),
    ),
    rows.length ? h("ol", {}, all ? rows : rows.slice(0, SHOWN)) : h("p", { class: "empty" }, hidden ? "No finding matches the filter." : allIsWell(map)),
  ];
}

/** Return findings without the offers of GPUs that have a fault: a GPU has one line. */
function oncePerGpu(findings) {
  const faulty = new Set(findings.filter((finding) => finding.finding === "fault" && finding.uuid).map((finding) => finding.uuid));
  return findings.filter((finding) => finding.finding !== "not_offered" || !faulty.has(finding.uuid));
}

const allIsWell = (map) =>
  !map.findings
    ? "The waste is not known."
    : map.unjudged_sentences.length
      ? "The known data shows no fault and no waste."
      : "No fault and no waste.";

const unjudged = (sentences) =>
  h(
    "details",
    { class: "unjudged" },
    h("summary", {}, "What gpumap could not check"),
    h("ul", {}, sentences.map((sentence) => h("li", {}, prose(sentence)))),
  );

/** Return the lines of sources that are down, and of processes that gpumap cannot see. */
const broken = (map, old) => [
  ...(old ? [fault("old", "No current data", null, old, null)] : []),
  ...map.sources.filter((source) => !source.up).map((source) => sourceDown(source, map)),
  ...(map.remedies.pid_visibility && map.sources.find((source) => source.source === "procfs")?.up
    ? [fault("pids", "Processes of other containers are not visible", "#health", map.pid_visibility_reason, remedy(map.remedies.pid_visibility))]
    : []),
];

function sourceDown(source, map) {
  const since = source.last_success ? `last answered ${duration(map.timestamp - source.last_success)} before` : "never answered";
  const why = `${source.reason || "no answer"}${source.detail ? `: ${source.detail}` : ""}, ${since}`;
  return fault(`source ${source.source}`, `${source.source} is down`, "#health", why, remedy(source.remedy));
}

const fault = (key, subject, href, why, whatToDo, kind = "fault") =>
  h(
    "li",
    { key, class: "fault" },
    findingMark(kind),
    h("span", { class: "what" }, href ? h("a", { href }, printable(subject)) : printable(subject)),
    because(why, whatToDo),
  );

/** Return a reason as a sentence, and what to do. */
const because = (why, whatToDo, title) =>
  h("span", { class: "because", title }, printable(why.charAt(0).toUpperCase() + why.slice(1)), ".", whatToDo);

/** Return the line of a finding. It links to the GPU, or to the row on the device. `advised`: the line before says what to do. */
function findingRow(finding, gpu, advised) {
  const key = `${finding.finding} ${finding.reason} ${finding.uuid}`;
  const whatToDo = advised ? null : advice(finding.remedy);
  if (GPU_FINDINGS.includes(finding.finding)) return fault(key, gpu ?? "GPU ?", finding.uuid && `#${finding.uuid}`, finding.why, whatToDo, finding.finding);
  const row = addressOf({ ...finding, owner: finding.finding === "leftover" ? "gone" : "" });
  const href = finding.uuid ? `#${finding.uuid}${finding.reason in SUBJECTS ? "" : `&${new URLSearchParams({ row })}`}` : null;
  const who = containerName(finding) ?? SUBJECTS[finding.reason] ?? "a pod without a name";
  return h(
    "li",
    { key: `${key} ${row} ${finding.why}` },
    findingMark(finding.finding),
    h("span", { class: "what" }, href ? h("a", { href }, who) : who),
    h("span", { class: "gpu-name" }, gpu),
    h("span", { class: "wasted number" }, finding.memory_bytes === null ? null : bytes(finding.memory_bytes)),
    because(finding.why, whatToDo, `Since ${moment(finding.since)}`),
  );
}

const SUBJECTS = { memory_without_process: "unexplained memory", busy_without_process: "stuck without a process" };
