// What stands above and below the devices: the overview, what is wrong with its remedy, and the sources.

import { h } from "./dom.js";
import { wish } from "./health.js";
import { containerName } from "./parts.js";
import { downGpus, totals } from "./totals.js";
import { bytes, CAPABILITIES, count, duration, FAULTS, known, name, printable, prose } from "./words.js";

export function overview(map, devices) {
  const all = totals(map, devices);
  const why = (source, otherwise) => (map.sources.find((one) => one.source === source)?.up ? otherwise : DOWN[source]);
  const noNvml = why("nvml", "No GPU tells it");
  const blind = !map.capabilities.pid_visibility && BLIND;
  const nobody = "Whose processes these are is not known now";
  const owners = why("nvml", blind || why("kubelet", why("pod_identity", nobody)));
  const idle = why("nvml", blind || why("kubelet", "No holder can be judged"));
  const number = (value, reason) => known(value, String, reason);
  const size = (value) => known(value, bytes, noNvml);
  const partitioned = devices.some((device) => device.mig_profile);
  return h(
    "dl",
    { class: "tiles" },
    tile(
      "GPUs",
      number(all.gpus, DOWN.nvml),
      (partitioned || all.gpus === null) && all.devices ? count(all.devices, "device") : null,
    ),
    tile("held", number(all.held, DOWN.kubelet), all.free === null ? (all.held === null ? null : `of ${all.devices}`) : `${all.free} free`),
    tile("memory used", size(all.used), all.total === null ? null : `of ${bytes(all.total)}`),
    tile("unattributed", size(all.unattributed), "owner not known"),
    tile("not assigned", number(all.squatters, owners), "squatters", all.squatters && "owner:unassigned"),
    tile(
      "left over",
      number(all.leftovers, owners),
      all.leftBytes ? bytes(all.leftBytes) : "of pods gone",
      all.leftovers && "owner:gone",
    ),
    tile("idle holders", number(all.idle, idle), all.unjudged ? `${all.unjudged} not known` : "no process, or SM 0 for 5 min"),
    tile("faults", all.faults, "GPUs, sources", null, all.faults > 0),
  );
}

const BLIND = "Processes of other containers cannot be seen (hostPID)";
const DOWN = {
  nvml: "NVML is down",
  kubelet: "The kubelet does not answer",
  pod_identity: "Processes cannot be named: pod_identity is down",
};

function tile(term, value, note, query, bad) {
  const shown = query ? h("button", { type: "button", "data-query": query, title: `Show ${query}` }, value) : value;
  return h(
    "div",
    { key: term, class: bad || query ? "tile wrong" : "tile" },
    h("dt", {}, term),
    h("dd", {}, shown, note ? h("span", { class: "of" }, note) : null),
  );
}

const remedyOf = (text) => (text ? h("span", { class: "remedy" }, " ", prose(text)) : null);

/** What is wrong, each with what to do. */
export function notices(map, devices) {
  const found = [];
  for (const source of map.sources.filter((one) => !one.up)) {
    const since = source.last_success
      ? `, last answered ${duration(map.timestamp - source.last_success)} before`
      : ", never answered";
    found.push(
      notice(
        `source ${source.source}`,
        "bad",
        `${source.source} is down`,
        `${source.reason ?? "no answer"}${source.detail ? `: ${source.detail}` : ""}${since}.`,
        source.remedy,
      ),
    );
  }
  for (const gpu of downGpus(map)) {
    found.push(
      notice(
        `gpu ${gpu.uuid ?? gpu.index}`,
        "bad",
        `GPU ${gpu.index} is down`,
        `${gpu.fault}: it ${FAULTS[gpu.fault] ?? "is not usable"}${gpu.uuid ? "" : ", and has not told its uuid"}.`,
        gpu.remedy,
        gpu.uuid && `#${gpu.uuid}`,
      ),
    );
  }
  for (const gpu of map.gpus.filter((one) => one.up && wish(one))) {
    const text = `It answers; recovery action: ${wish(gpu)}.`;
    found.push(notice(`ill ${gpu.uuid}`, "bad", `GPU ${gpu.index} is ill`, text, gpu.recovery_action.remedy, `#${gpu.uuid}`));
  }
  if (map.capabilities.pid_visibility === false && map.sources.find((one) => one.source === "procfs")?.up) {
    found.push(
      notice(
        "pids",
        "warn",
        "Processes of other containers cannot be seen",
        "What each container uses is not known.",
        map.remedies?.pid_visibility ?? "Run gpumap with hostPID: true.",
      ),
    );
  }
  if (map.unmatched.length) found.push(unmatched(map.unmatched));
  if (!devices.length && !map.nameless_gpus.length && map.sources.find((one) => one.source === "nvml")?.up) {
    found.push(notice("none", "warn", "No device", "NVML counts no GPU on this node."));
  }
  return found;
}

function notice(key, level, title, text, remedy, href) {
  return h(
    "div",
    { key, class: `notice ${level}` },
    h("h2", {}, href ? h("a", { href }, title) : title),
    h("p", {}, printable(text), remedyOf(remedy)),
  );
}

const NAMED = 8;
const REASONS = {
  unparsed: "the id does not tell a GPU",
  not_in_nvml: "NVML knows no such GPU",
  untrusted_id: "the plugin's ids do not name the GPU that it gives",
  nvml_down: "NVML is down",
  device_down: "some GPU has not told its uuid",
};

const unmatched = (rows) =>
  h(
    "div",
    { key: "unmatched", class: "notice warn" },
    h(
      "h2",
      {},
      `${count(
        rows.reduce((all, row) => all + row.slots, 0),
        "assigned slot",
      )} on no known device`,
    ),
    grouped(rows).map(([key, group]) =>
      h(
        "div",
        { key },
        h("p", {}, `${REASONS[group[0].reason] ?? ""} (${printable(group[0].reason)}).`, remedyOf(group[0].remedy)),
        h(
          "ul",
          {},
          group
            .slice(0, NAMED)
            .map((row) =>
              h(
                "li",
                { key: JSON.stringify([row.namespace, row.pod, row.container, row.resource]) },
                containerName(row),
                h("span", { class: "remark" }, ` ${row.slots} × ${printable(row.resource)}`),
              ),
            ),
          group.length > NAMED && h("li", {}, `and ${group.length - NAMED} more: see api/v1/map`),
        ),
      ),
    ),
  );

function grouped(rows) {
  const groups = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.reason, row.remedy]);
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  return [...groups];
}

export function health(map) {
  const sources = map.sources.map((source) => {
    const errors = Object.entries(source.errors).filter(([, times]) => times);
    return h(
      "li",
      { key: source.source, class: source.up ? "works" : "fails" },
      h("span", { class: "state-word" }, source.up ? "works" : "down"),
      h("b", {}, source.source),
      h(
        "span",
        { class: "remark" },
        source.reason ? `${printable(source.reason)}${source.detail ? `: ${printable(source.detail)}` : ""}. ` : "",
        errors.length
          ? `Since the start: ${errors.map(([reason, times]) => `${printable(reason)} ${times}×`).join(", ")}.`
          : "",
      ),
    );
  });
  const capabilities = Object.entries(map.capabilities).map(([capability, has]) =>
    h(
      "li",
      { key: capability, class: has ? "works" : "without" },
      h("span", { class: "state-word" }, has ? "yes" : "no"),
      h("b", {}, printable(capability)),
      h("span", { class: "remark" }, CAPABILITIES[capability] ?? "", !has && remedyOf(map.remedies?.[capability])),
    ),
  );
  return [
    h("h2", {}, "Sources and capabilities"),
    h("div", { class: "two" }, h("ul", {}, sources), h("ul", {}, capabilities)),
  ];
}

export function driverLine(map) {
  const driver = map.driver;
  return [
    name(map.node.name, { class: "node-name", title: map.node.internal_ip ?? "" }),
    driver
      ? h(
          "span",
          { class: "of" },
          ` driver ${printable(driver.driver_version)} · CUDA ${printable(driver.cuda_version)}`,
        )
      : null,
  ];
}
