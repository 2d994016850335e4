// The numbers of the node, its name, its sources and its driver.

import { h } from "./dom.js";
import { findingsOf, hasKubelet, oneModel, sorted, wasteOf } from "./model.js";
import { remedy } from "./parts.js";
import { totals } from "./totals.js";
import { bytes, CAPABILITIES, count, cutName, known, printable } from "./words.js";

/** Return the numbers of the node. The numbers of waste come from the agent, and link to their rows. */
export function overview(map, devices) {
  const all = totals(map, devices);
  const assigned = hasKubelet(map); // without a kubelet, nothing is assigned and nothing wasted
  const sums = map.finding_sums ?? {};
  const down = map.sources.filter((source) => !source.up).length;
  const unknown = map.unjudged_sentences[0] ?? "gpumap could not check all of it";
  const findings = findingsOf(map);
  const pods = (kind) => new Set(findings.filter((finding) => finding.finding === kind).map(({ namespace, pod }) => `${namespace}/${pod}`)).size;
  const migDevices = devices.filter((device) => device.mig).length;
  const wholeGpus = all.gpus - map.gpus.filter((gpu) => gpu.partitioned).length;
  const rest = all.unattributed > all.used / 50 ? `${bytes(all.unattributed)} unattributed` : null;
  const size = (value) => known(value, bytes, unknown);
  const [first] = sorted(findings.filter(wasteOf), "-waste", { waste: wasteOf });
  return h(
    "dl",
    { class: "tiles" },
    tile("GPUs", "GPUs and MIG devices, and GPUs with a running kernel", known(all.gpus, migDevices ? () => `${wholeGpus ? `${count(wholeGpus, "GPU")} + ` : ""}${count(migDevices, "MIG device")}` : String, unknown), [
      all.gpus === null && all.devices ? count(all.devices, "device") : null,
      all.busy === null ? null : `${all.busy} busy`,
    ]),
    assigned && tile("Held", "Devices that a container holds. Free: a new pod could be given it", known(all.held, (held) => `${held} of ${all.devices}`, unknown), [
      all.free === null ? null : `${all.free} free`,
      all.partly ? `${all.partly} partly` : null,
    ]),
    tile("Memory used", "By all owners. Unattributed: without a known owner", known(all.used, bytes, map.unjudged_sentences[0] ?? "No GPU reports it"), [
      all.total === null ? null : `of ${bytes(all.total)}`,
      rest,
    ]),
    assigned && tile("Wastes most", "The finding with the most memory, and granted memory that idle and other holders do not use", first ? (first.pod ? cutName(first.pod, "pod") : first.finding) : size(sums.unused_bytes), [
      first && `${first.memory_bytes ? bytes(first.memory_bytes) : gpus(first.gpus)} ${first.finding.replace("_", " ")}`,
      /idle|unused/.test(first?.finding) && sums.unused_bytes && `${bytes(sums.unused_bytes)} in all`,
    ], "waste", first && "sort=-waste"),
    assigned && tile("Idle", "Containers that hold a device and do no work", known(sums.idle_holders, (number) => count(number, "holder"), unknown), [gpus(sums.idle_gpus), sums.maybe_idle_gpus ? `${gpus(sums.maybe_idle_gpus)} maybe idle` : null], "idle", sums.idle_holders),
    assigned && tile("Squatter", "Memory of containers that do not hold the device", size(sums.squatter_bytes), [pods("squatter") && count(pods("squatter"), "pod")], "squatter", sums.squatter_bytes),
    assigned && tile("Leftover", "Memory that deleted pods still use", size(sums.leftover_bytes), [pods("leftover") && count(pods("leftover"), "pod")], "leftover", sums.leftover_bytes),
    tile("Fault", "GPUs that are down or need repair", known(sums.faults, String, unknown), [down ? `${count(down, "source")} down` : null], "fault", sums.faults),
  );
}

const gpus = (number) => (number ? count(Number(number.toPrecision(2)), "GPU") : null);

/** Return a number with notes. If there is something, it links to the rows of that kind of finding, or where `link` leads. */
function tile(term, means, value, notes, kind, link) {
  const href = `#${typeof link === "string" ? link : `q=finding:${kind}`}`;
  const texts = notes.filter(Boolean).map((note, index) => (index ? `, ${note}` : note));
  return h(
    "div",
    { key: term, class: link ? `tile is-${kind}` : "tile", title: means },
    h("dt", {}, term),
    h("dd", {}, link ? h("a", { href }, value) : value, texts.length > 0 && h("span", { class: "of" }, texts)),
  );
}

export function health(map) {
  const driver = map.driver && `Driver ${map.driver.driver_version}, CUDA ${map.driver.cuda_version}. `;
  const sources = map.sources.map((source) => {
    const errors = Object.entries(source.errors).filter(([, times]) => times);
    return line(source.source, source.up ? "works" : "fails", source.up ? (source.reason ? "partly" : "works") : "down", [
      source.source === "nvml" && driver ? printable(driver) : "",
      source.reason ? `${printable(source.reason)}${source.detail ? `: ${printable(source.detail)}` : ""}. ` : "",
      errors.length
        ? `Errors since the start: ${errors.map(([reason, times]) => `${printable(reason)} ${times}×`).join(", ")}.`
        : "",
    ]);
  });
  const capabilities = Object.entries(map.capabilities).map(([capability, has]) =>
    line(capability, has ? "works" : "without", has ? "yes" : "no", [
      CAPABILITIES[capability] ?? "",
      !has && remedy(map.remedies?.[capability]),
    ]),
  );
  return [
    h("h2", {}, "Sources and capabilities"),
    h("div", { class: "two" }, h("ul", {}, sources), h("ul", {}, capabilities)),
  ];
}

const line = (key, kind, word, remark) =>
  h("li", { key, class: kind }, h("span", { class: "state-word" }, word), h("b", {}, printable(key)), h("span", { class: "remark" }, remark));

/** Return the name of the node, and the model if all GPUs are of one. */
export function nodeLine({ name: node, internal_ip: title, gpus }) {
  const model = oneModel(gpus);
  return [
    h("span", { title }, cutName(node, "node-name")),
    model && h("span", { class: "of" }, ` ${gpus.length} × ${printable(model)}`),
  ];
}
