// The numbers of the node, its name, its sources and its driver.

import { h } from "./dom.js";
import { findingsOf, hasKubelet, oneModel, sorted } from "./model.js";
import { remedy } from "./parts.js";
import { totals } from "./totals.js";
import { bytes, CAPABILITIES, count, known, name, printable } from "./words.js";

/** Return the numbers of the node. The numbers of waste come from the agent, and link to their rows. */
export function overview(map, devices) {
  const all = totals(map, devices);
  const assigned = hasKubelet(map); // without a kubelet, nothing is assigned and nothing wasted
  const sums = map.finding_sums ?? {};
  const down = map.sources.filter((one) => !one.up).length;
  const unknown = map.unjudged_sentences[0] ?? "gpumap could not check all of it";
  const of = (...kinds) => findingsOf(map).filter((one) => kinds.includes(one.finding));
  const partitioned = devices.some((device) => device.mig);
  const rest = all.unattributed > all.used / 50 ? `, ${bytes(all.unattributed)} unattributed` : "";
  const size = (value) => known(value, bytes, unknown);
  return h(
    "dl",
    { class: "tiles" },
    tile("GPUs", "GPUs, and GPUs with a running kernel", known(all.gpus, String, unknown), [
      (partitioned || all.gpus === null) && all.devices ? count(all.devices, "device") : null,
      all.busy === null ? null : `${all.busy} busy`,
    ]),
    assigned && tile("Held", "Devices that a container holds. Free: certainly no container holds it", known(all.held, (held) => `${held} of ${all.devices}`, unknown), [
      all.free === null ? null : `${all.free} free`,
    ]),
    tile("Memory used", "By all owners. Unattributed: without a known owner", known(all.used, bytes, map.unjudged_sentences[0] ?? "No GPU reports it"), [
      all.total === null ? null : `of ${bytes(all.total)}${rest}`,
    ]),
    assigned && tile("Granted, not used", "Of idle holders, and of holders that leave more than a fifth unused", size(sums.unused_bytes), [mostOf(of("idle", "unused"))], "idle,unused"),
    assigned && tile("Held idle", "Containers that hold a device and do no work", known(sums.idle_holders, (number) => count(number, "holder"), unknown), [gpus(sums.idle_gpus), sums.maybe_idle_gpus ? `${gpus(sums.maybe_idle_gpus)} may be idle` : null], "idle"),
    assigned && tile("Used, not granted", "By containers that do not hold the device", size(sums.squatter_bytes), [pods(of("squatter"))], "squatter"),
    assigned && tile("Left over", "Still used by deleted pods", size(sums.leftover_bytes), [pods(of("leftover"))], "leftover"),
    tile("Faults", "GPUs that are down or need repair", known(sums.faults, String, unknown), [down ? `${count(down, "source")} down` : null], "fault"),
  );
}

const gpus = (held) => (held ? count(Number(held.toPrecision(2)), "GPU") : null);
const pods = (found) => (found.length ? count(new Set(found.map((one) => `${one.namespace}/${one.pod}`)).size, "pod") : null);

/** Return the pod of the finding with the most unused memory. */
function mostOf(found) {
  const [first] = sorted(found, "-waste", { waste: (one) => one.memory_bytes });
  return first?.memory_bytes ? ["most by ", name(first.pod)] : null;
}

/** Return a number with notes. With a `kind` of finding it links to the rows of that finding. */
function tile(term, means, value, notes, kind) {
  const shown = notes.filter(Boolean);
  const found = kind && typeof value === "string" && value !== "0" && !value.startsWith("0 ");
  const href = `#${new URLSearchParams({ q: `finding:${kind}` })}`;
  return h(
    "div",
    { key: term, class: found ? `tile is-${kind}` : "tile", title: means },
    h("dt", {}, term),
    h("dd", {}, found ? h("a", { href }, value) : value, shown.length ? h("span", { class: "of" }, shown.map((one, at) => [at ? ", " : "", one])) : null),
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

const line = (key, of, word, remark) =>
  h("li", { key, class: of }, h("span", { class: "state-word" }, word), h("b", {}, printable(key)), h("span", { class: "remark" }, remark));

/** Return the name of the node, and the model if all GPUs are of one. */
export function nodeLine({ name: node, internal_ip: title, gpus }) {
  const model = oneModel(gpus);
  return [
    name(node, { class: "node-name", title }),
    model && h("span", { class: "of" }, ` ${gpus.length} × ${printable(model)}`),
  ];
}
