// Turns the document of /api/v1/map into rows: holders, users and other use of each device. Filters and sorts them.

const TINTS = 6;

const text = (value) => value ?? "";
export const keyOf = (row) => JSON.stringify([text(row.namespace), text(row.pod), text(row.container)]);

/** Return the name of work outside pods, such as `docker/4f1c9e0b7a2d`; empty if it has none. */
export const workName = (work) => (work && work.kind !== "other" ? `${work.kind}/${work.name}` : "");

/** Return a row for an address: `ns/pod/container`, with a mark for deleted pods; of work outside pods its name. */
export const addressOf = (row) =>
  row.kind === "rest" && row.work ? row.work : `${[row.namespace, row.pod, row.container].map(text).join("/")}${row.owner === "gone" ? " gone" : ""}`;

/** Return whether the kubelet is a source. With --no-kubelet it is none: no container holds a device. */
export const hasKubelet = (map) => map.sources.some((source) => source.source === "kubelet");

/**
 * The devices of a document with their GPU and rows, in the order of the GPUs. `holding` are the containers that hold a
 * device, `whole` those that hold its partitioned GPU as a whole. A row's `finding` is the agent's.
 */
export function devicesOf(map) {
  const gpus = new Map(map.gpus.map((gpu) => [gpu.uuid, { ...gpu, ...signsOf(gpu, map) }]));
  const findings = findingsByRow(map);
  const devices = map.devices.map((device) => {
    const gpu = gpus.get(device.gpu_uuid) ?? null;
    const parent = map.devices.find((other) => other !== device && other.uuid === device.gpu_uuid);
    const whole = parent ? holding(parent) : [];
    const rows = [...containerRows(device, whole, findings), ...restRows(device, findings)];
    const unexplained = findingsOf(map).filter((finding) => finding.finding === "unexplained" && finding.uuid === device.uuid);
    return { ...device, gpu, findings: unexplained, whole, rows, holding: holding(device), owners: new Map(device.owners.map((use) => [use.owner, use])) };
  });
  for (const { devices: parts } of gpusOf(devices)) tint(parts.flatMap((device) => device.rows));
  const without = [...gpus.values()].filter((gpu) => !devices.some((device) => device.gpu === gpu));
  return [...devices, ...without.map(bare)].sort(
    (a, b) =>
      (a.index ?? 1e9) - (b.index ?? 1e9) ||
      (a.mig?.gpu_instance_id ?? -1) - (b.mig?.gpu_instance_id ?? -1) ||
      (a.mig?.compute_instance_id ?? -1) - (b.mig?.compute_instance_id ?? -1) ||
      (a.uuid < b.uuid ? -1 : 1),
  );
}

export const modelOf = (gpu) => (gpu?.model ?? "").replace(/^NVIDIA /, "");

/** Return the model of all GPUs; null if they differ. */
export const oneModel = (gpus) => (new Set(gpus.map(modelOf)).size === 1 ? modelOf(gpus[0]) : null);

/** Return the findings that people see: of the faults of a GPU only the worst. It counts the GPU and names the others. */
export const findingsOf = (map) => (map.findings ?? []).filter((finding) => finding.finding !== "fault" || finding.gpus !== 0);

/** Kinds of findings of a GPU, not of a container or a device. */
export const GPU_FINDINGS = ["fault", "not_offered"];

/** Return the findings of a GPU, and its XID errors: each code with its words, whether it is a fault, the number and the last time. */
function signsOf({ uuid }, map) {
  const { counts = {}, meanings = {}, last_at = {} } = map.xids.find((errors) => errors.uuid === uuid) ?? {};
  const words = (code) => `XID ${code}${meanings[code] ? `: ${meanings[code]}` : ""}`;
  const isFatal = (code) => map.findings?.some((finding) => finding.uuid === uuid && finding.reason === `xid_${code}`) ?? false;
  return {
    faults: findingsOf(map).filter((finding) => GPU_FINDINGS.includes(finding.finding) && finding.uuid === uuid),
    xids: Object.entries(counts).map(([code, errors]) => ({ code, errors, words: words(code), fatal: isFatal(code), timestamp: last_at[code] })),
  };
}

/** Return the memory, and then the GPUs, that a finding of a container wastes; null if neither is known. */
export const wasteOf = (finding) => (GPU_FINDINGS.includes(finding.finding) ? null : (finding.memory_bytes ?? 0) + (finding.gpus ?? 0) || null);

const holding = (device) => device.containers.filter((container) => container.grant);

/** Return the worst finding of each row with its place in the agent's order. A leftover may have the name of a live container. */
const findingsByRow = (map) =>
  new Map(findingsOf(map).map((finding, place) => [`${finding.finding === "leftover" ? "gone " : ""}${finding.uuid} ${keyOf(finding)}`, { ...finding, place }]).reverse());

/** Return the lines of the strip: the devices of each GPU in order. A device that NVML does not list has its own line. */
export function gpusOf(devices) {
  const lines = new Map();
  for (const device of devices) {
    const uuid = device.gpu?.uuid ?? device.uuid;
    if (!lines.has(uuid)) lines.set(uuid, { uuid, index: device.index, gpu: device.gpu, devices: [] });
    lines.get(uuid).devices.push(device);
  }
  return [...lines.values()];
}

/** Return whether a container uses what it was given: by the kubelet, or by a scheduler beside it. */
export const isGranted = (row) => row.owner === "assigned" || row.owner === "scheduled";

/** Give segments of the bar and marks in the table the same colour. */
function tint(rows) {
  let number = 0;
  for (const row of [...rows].sort((a, b) => b.used - a.used)) {
    if (row.used > 0) row.tint = isGranted(row) ? `tint-${number++ % TINTS}` : `is-${row.owner}`;
  }
}

/** A partitioned GPU without MIG devices: the kubelet cannot assign it. */
function bare(gpu) {
  return {
    uuid: gpu.uuid,
    gpu_uuid: gpu.uuid,
    index: gpu.index,
    mig: null,
    memory: gpu.reading?.memory ?? null,
    holding: [],
    whole: [],
    processes: [],
    gpu,
    rows: [],
    owners: new Map(),
    bare: true,
  };
}

function containerRows(device, whole, findings) {
  const processes = processesByRow(device);
  const holdWhole = new Set(whole.map(keyOf));
  return device.containers.map((container) => {
    const key = keyOf(container);
    const { grant, use } = container;
    return {
      ...container,
      kind: "container",
      key,
      granted: grant?.memory_bytes ?? null,
      used: use?.memory_bytes ?? null,
      last: (use && container.watch?.last_active) ?? null,
      slots: grant ? Object.values(grant.slots) : null, // of different units: not to be added up
      gpus: grant?.gpus ?? null,
      peak: use?.memory_peak_bytes ?? null,
      sm: use?.sm_ratio ?? use?.sm_activity_ratio ?? null,
      whole: holdWhole.has(key),
      processes: processes.get(key) ?? [],
      finding: findings.get(`${device.uuid} ${key}`) ?? null,
    };
  });
}

function processesByRow(device) {
  const otherPids = new Set(device.others.flatMap((use) => use.pids));
  const processes = new Map();
  for (const process of device.processes.filter(({ pid }) => !otherPids.has(pid)))
    processes.set(keyOf(process), [...(processes.get(keyOf(process)) ?? []), process]);
  return processes;
}

/** Return the rows of use that no container's row counts. */
function restRows(device, findings) {
  const processes = new Map(device.processes.map((process) => [process.pid, process]));
  return device.others.map((use) => ({
    ...use,
    kind: "rest",
    key: [use.owner, keyOf(use), workName(use.work)].join(" "),
    processes: use.pids.map((pid) => processes.get(pid)),
    used: use.memory_bytes,
    sm: use.sm_ratio,
    work: workName(use.work),
    finding: (use.owner === "gone" && findings.get(`gone ${device.uuid} ${keyOf(use)}`)) || null,
  }));
}

export function processesOf(devices) {
  return devices.flatMap((device) =>
    device.processes.map((process) => ({
      ...process,
      device,
      key: `${device.uuid} ${process.pid}`,
      used: process.memory_bytes,
      sm: process.sm_ratio,
      work: workName(process.work),
      finding: device.rows.find((row) => row.processes.includes(process))?.finding,
    })),
  );
}

// --- filter: the same as the WORDs of the commands (cli/filter.py; tests/filter_cases.py has cases of both) -------------

const FIELDS = ["gpu", "uuid", "model", "xid", "ns", "pod", "container", "owner", "finding"];
export const TERMS = FIELDS.map((field) => `${field}:`).join(" ");

/** Return the terms of a filter. All must match. "owner:gone" tests one field, a bare word tests all. */
const parse = (query) =>
  query
    .toLowerCase()
    .replace(/\b(gpu|xid) (\d+)\b/g, "$1:$2") // as the page writes it
    .split(/\s+/)
    .filter(Boolean)
    .map((word) => {
      const [, field, value] = /^(\w+):(.+)$/.exec(word) ?? [];
      return FIELDS.includes(field) ? { field, value } : { value: word };
    });

/** Return whether a text, or a list of whole values, has the term. A bare number is not matched within a longer one. */
function matches({ field, value }, ...texts) {
  if (field) return value.split(",").some((part) => texts.some((words) => words[field]?.includes(part)));
  const all = texts.map((words) => words.all).join("\n");
  if (/^\d+$/.test(value)) return new RegExp(`\\b${value}\\b`).test(all);
  return all.includes(value) || (value.length >= 8 && texts.some((words) => words.uuid?.includes(value)));
}

const lowered = (words) => words.flat().map(text).join("\n").toLowerCase();

function wordsOfDevice(device) {
  const { index, uuid, gpu_uuid: parent, mig, gpu, findings = [] } = device ?? {};
  const own = [...(gpu?.faults ?? []), ...findings];
  const words = {
    gpu: [`${index}`, ...(mig ? [`${index}/${mig.gpu_instance_id}/${mig.compute_instance_id}`] : [])],
    uuid: lowered([uuid, parent, gpu?.pci_bus_id]),
    model: lowered([gpu?.model, mig?.profile]),
    xid: (gpu?.xids ?? []).map((error) => error.code),
    finding: own.map((finding) => finding.finding),
  };
  const signs = [...(gpu?.xids ?? []).map((error) => error.words), ...own.map((finding) => finding.why)];
  return { ...words, all: lowered([index, words.model, words.finding, signs]) };
}

function wordsOfRow({ namespace, pod, container, work, owner, finding, processes, resource, reason }) {
  const [ns, name, part, who] = [namespace, pod || work, container, owner].map((word) => text(word).toLowerCase());
  const pids = (processes ?? []).map((process) => `${process.pid} ${process.comm}`);
  const names = [namespace, pod, container].filter(Boolean).join("/");
  const all = lowered([ns, name, part, who, text(finding?.finding), names, resource, reason, pids, text(finding?.why)]);
  return { ns, pod: name, container: part, owner: who, finding: finding ? [finding.finding] : [], all };
}

/** Return the devices that match, with their matching rows. */
export function filtered(devices, query) {
  const terms = parse(query);
  return devices.flatMap((device) => {
    const words = wordsOfDevice(device);
    if (terms.every((term) => matches(term, words))) return [device];
    const rows = device.rows.filter((row) => terms.every((term) => matches(term, words, wordsOfRow(row))));
    return rows.length ? [{ ...device, rows, narrowed: true }] : [];
  });
}

/** Return the findings that match: by themselves, by their row, or by their device; and those of GPUs of devices that match. */
export function filteredFindings(map, devices, query) {
  const terms = parse(query);
  const selected = filtered(devices, query).map((device) => device.gpu_uuid);
  const rows = new Map(devices.flatMap((device) => device.rows.map((row) => [row.finding?.place, row])));
  return findingsOf(map).filter((finding, place) => {
    const device = devices.find(({ uuid }) => uuid === finding.uuid) ?? devices.find((other) => other.gpu_uuid === finding.uuid);
    const words = wordsOfRow({ ...(rows.get(place) ?? finding), finding });
    const ofGpu = GPU_FINDINGS.includes(finding.finding) && selected.includes(finding.uuid);
    return ofGpu || terms.every((term) => matches(term, wordsOfDevice(device), words));
  });
}

export function filteredProcesses(processes, query) {
  const terms = parse(query);
  const words = (process) => wordsOfRow({ ...process, processes: [process] });
  return processes.filter((process) => terms.every((term) => matches(term, wordsOfDevice(process.device), words(process))));
}

// --- order -----------------------------------------------------------------------------------------------------------

const nameOf = (row) => (row.pod ? `${row.namespace}/${row.pod}/${row.container ?? ""}` : row.work || "￿");

/** Sort by a column; "-used" sorts from the largest. Unknown values are last in both orders; equal ones sort by name. */
export function sorted(rows, order, values) {
  const down = order.startsWith("-");
  const value = values[order.replace("-", "")];
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  return rows
    .map((row) => [value(row), row])
    .sort(([a, one], [b, other]) => {
      const [noA, noB] = [a === null || a === undefined || a === "", b === null || b === undefined || b === ""];
      if (noA || noB) return noA - noB || compare(nameOf(one), nameOf(other));
      return (down ? compare(b, a) : compare(a, b)) || compare(nameOf(one), nameOf(other));
    })
    .map(([, row]) => row);
}

export const BY = {
  attention: (row) => (row.finding ? row.finding.place - 1e15 : (row.kind === "rest" ? 1e15 : 0) - (row.used ?? 0)),
  waste: (row) => row.finding && wasteOf(row.finding),
  name: nameOf,
  slots: (row) => row.slots?.[0],
  gpus: (row) => row.gpus,
  granted: (row) => row.granted,
  used: (row) => row.used,
  peak: (row) => row.peak,
  sm: (row) => row.sm,
  last: (row) => row.last,
};

export const PROCESSES_BY = {
  pid: (process) => process.pid,
  type: (process) => process.type,
  command: (process) => process.comm,
  device: (process) =>
    (process.device.index ?? 1e6) * 1e4 + (process.device.mig?.gpu_instance_id ?? 0) * 100 + (process.device.mig?.compute_instance_id ?? 0),
  owner: (process) => process.owner,
  name: nameOf,
  used: (process) => process.used,
  sm: (process) => process.sm,
};
