// The list of problems: sources that are down, then the agent's findings in their order, or the largest waste first.

import { h } from "./dom.js";
import { addressOf, filteredFindings, findingsOf, GPU_FINDINGS, sorted } from "./model.js";
import { containerName, deviceName, findingMark, more, remedy } from "./parts.js";
import { bytes, duration, moment, printable, prose } from "./words.js";

const SHOWN = 5; // before one asks for the rest

/** The list. `old` is the reason why there is no current data, if there is none. */
export function attention(map, devices, old, state) {
  const byWaste = state.sort.endsWith("waste");
  const judged = filteredFindings(map, devices, state.query);
  const found = byWaste ? sorted(judged, state.sort, { waste: (one) => one.memory_bytes }) : judged;
  const names = new Map([...map.gpus, ...devices].map((one) => [one.uuid, deviceName(one).replace(/ whole| MIG/, "")]));
  const rows = [...broken(map, old), ...found.map((one, at) => finding(one, names.get(one.uuid), one.remedy === found[at - 1]?.remedy))];
  const hidden = findingsOf(map).length - found.length;
  const all = state.all || rows.length <= SHOWN + 1;
  return [
    h(
      "div",
      { class: "title" },
      h("h2", {}, "Needs attention", (rows.length > 0 || hidden > 0) && h("span", { class: "of" }, ` ${rows.length}${hidden ? ` of ${rows.length + hidden}` : ""}`)),
      rows.length > SHOWN + 1 && more({ "data-all": "" }, all, SHOWN, rows.length),
      found.length > 1 &&
        state.view === "devices" &&
        h("button", { type: "button", class: "more", "data-sort": byWaste ? "attention" : "waste" }, byWaste ? "Worst first" : "Largest waste first"),
      map.unjudged_sentences?.length > 0 && unjudged(map.unjudged_sentences),
    ),
    rows.length ? h("ol", {}, all ? rows : rows.slice(0, SHOWN)) : h("p", { class: "empty" }, hidden ? "No finding matches the filter." : allIsWell(map)),
  ];
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
  ...map.sources.filter((one) => !one.up).map((one) => sourceDown(one, map)),
  ...(map.remedies.pid_visibility && map.sources.find((one) => one.source === "procfs")?.up
    ? [fault("pids", "Processes of other containers are not visible", "#health", map.pid_visibility_reason, map.remedies.pid_visibility)]
    : []),
];

function sourceDown(source, map) {
  const since = source.last_success ? `last answered ${duration(map.timestamp - source.last_success)} before` : "never answered";
  const why = `${source.reason || "no answer"}${source.detail ? `: ${source.detail}` : ""}, ${since}`;
  return fault(`source ${source.source}`, `${source.source} is down`, "#health", why, source.remedy);
}

const fault = (key, subject, href, why, advice, kind = "fault") =>
  h(
    "li",
    { key, class: "fault" },
    findingMark(kind),
    h("span", { class: "what" }, href ? h("a", { href }, printable(subject)) : printable(subject)),
    because(why, advice),
  );

/** Return a reason as a sentence, and what to do. */
const because = (why, advice, title) =>
  h("span", { class: "because", title }, printable(why.charAt(0).toUpperCase() + why.slice(1)), ".", remedy(advice));

/** Return the line of a finding. It links to the GPU, or to the row on the device. `advised`: the line before has its advice. */
function finding(one, gpu, advised) {
  const key = `${one.finding} ${one.reason} ${one.uuid}`;
  const advice = advised ? null : one.remedy;
  if (GPU_FINDINGS.includes(one.finding)) return fault(key, gpu ?? "GPU ?", one.uuid && `#${one.uuid}`, one.why, advice, one.finding);
  const row = addressOf({ ...one, owner: one.finding === "leftover" ? "gone" : "" });
  const href = one.uuid ? `#${one.uuid}${one.reason in SUBJECTS ? "" : `&${new URLSearchParams({ row })}`}` : null;
  const who = containerName(one) ?? SUBJECTS[one.reason] ?? "a deleted pod";
  return h(
    "li",
    { key: `${key} ${row} ${one.why}` },
    findingMark(one.finding),
    h("span", { class: "what" }, href ? h("a", { href }, who) : who),
    h("span", { class: "gpu-name" }, gpu),
    h("span", { class: "wasted number" }, one.memory_bytes === null ? null : h("span", { title: WASTE[one.finding] }, bytes(one.memory_bytes))),
    because(one.why, advice, `Since ${moment(one.since)}`),
  );
}

const SUBJECTS = { memory_without_process: "unexplained memory", busy_without_process: "stuck without a process" };

const WASTE = {
  squatter: "Used memory without a grant",
  leftover: "Memory still in use",
  unexplained: "Used memory without a process",
  over: "Used memory above the grant",
  idle: "Granted memory that is not used",
  maybe_idle: "Granted memory that is not used",
  unused: "Granted memory that is not used",
};
