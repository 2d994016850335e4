// What stands above and below the devices: the overview, what is wrong with its remedy, and the sources.

import { h } from "./dom.js";
import { containerName } from "./parts.js";
import { bytes, CAPABILITIES, count, duration, FAULTS, known, name, printable, prose } from "./words.js";

export function overview(map, devices, context) {
  const leaves = devices.filter((device) => !device.bare);
  const held = leaves.filter((device) => device.holders.length).length;
  const up = leaves.filter((device) => device.memory);
  const of = (owner, field) => sum(leaves.map((device) => device.owners.get(owner)?.[field]));
  const squatters = leaves.flatMap((device) => device.rows).filter((row) => row.owner === "unassigned").length;
  const idle = leaves.flatMap((device) => device.rows).filter((row) => row.holder && row.idle !== null).length;
  const unattributed = sum([of("unaccounted", "memory_bytes"), of("unknown", "memory_bytes")]);
  const faults = map.gpus.filter((gpu) => !gpu.up).length + map.sources.filter((source) => !source.up).length;
  const owners = leaves.some((device) => device.owners.has("gone"));
  const noOwners = "Whose processes these are is not known now";
  const mig = leaves.length !== map.gpus.length && leaves.some((device) => device.mig_profile);
  return h(
    "dl",
    { class: "tiles" },
    tile("GPUs", map.gpus.length, mig ? `${leaves.length} devices` : null),
    tile(
      "held",
      context.allocationKnown ? held : known(null, null, "The kubelet does not answer"),
      context.allocationKnown ? `${leaves.length - held} free` : null,
    ),
    tile(
      "memory used",
      up.length ? bytes(sum(up.map((one) => one.memory.used_bytes))) : known(null, null, "No device tells its memory"),
      up.length ? `of ${bytes(sum(up.map((one) => one.memory.total_bytes)))}` : null,
    ),
    tile(
      "unattributed",
      unattributed === null ? known(null, null, "No device tells its memory") : bytes(unattributed),
      "owner not known",
    ),
    tile(
      "not assigned",
      owners ? squatters : known(null, null, noOwners),
      "squatters",
      squatters && "owner:unassigned",
    ),
    tile(
      "left over",
      owners ? (of("gone", "processes") ?? 0) : known(null, null, noOwners),
      of("gone", "memory_bytes") ? bytes(of("gone", "memory_bytes")) : "of pods gone",
      of("gone", "processes") && "owner:gone",
    ),
    tile("idle holders", idle, "5 min or more"),
    tile("faults", faults, "GPUs, sources", null, faults > 0),
  );
}

const sum = (numbers) => {
  const found = numbers.filter((one) => one !== null && one !== undefined);
  return found.length ? found.reduce((a, b) => a + b, 0) : null;
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
  for (const gpu of map.gpus.filter((one) => !one.up)) {
    found.push(
      notice(
        `gpu ${gpu.uuid}`,
        "bad",
        `GPU ${gpu.index} is down`,
        `${gpu.fault}: it ${FAULTS[gpu.fault] ?? "is not usable"}.`,
        gpu.remedy,
        `#${gpu.uuid}`,
      ),
    );
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
  if (!devices.length && map.sources.find((one) => one.source === "nvml")?.up) {
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
