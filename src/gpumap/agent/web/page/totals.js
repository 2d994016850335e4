// The sums of the overview. A sum is null if nothing of it is known.

const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const NOT_OWN = new Set(["unaccounted", "sibling", "unknown"]);

/** Devices that a container can be assigned: MIG devices, and GPUs without partitions. */
const leavesOf = (devices) => devices.filter((device) => !device.bare && !device.partitioned);

const isHeld = (device) => device.holding.length > 0 || device.whole.length > 0;

/** Return whether a process is known on the device, with any owner. */
export const isUsed = (device) => device.rows.some((row) => row.processes.length > 0);

/** Return the memory of all processes of a device that does not report its own memory; null if it is not known. */
export const listedBytes = (device) =>
  device.memory || !device.owners.size ? null : sum([...device.owners.values()].map((use) => use.memory_bytes ?? 0));

/** Certainly free: read, not held, not in use, and no slot matches an unknown device. */
const isFree = (device) => device.owners.size > 0 && !isHeld(device) && !isUsed(device);

/** GPUs that are down, also those that never reported their uuid. */
export const downGpus = (map) => [...map.gpus.filter((gpu) => gpu.fault), ...map.nameless_gpus];

export function totals(map, devices) {
  const up = new Set(map.sources.filter((one) => one.up).map((one) => one.source));
  const leaves = leavesOf(devices);
  const pools = poolsOf(leaves);
  const unified = leaves.map(listedBytes).filter((one) => one !== null);
  const held = leaves.filter(isHeld).length;
  const known = new Set(map.devices.filter((one) => one.holders !== null).map((one) => one.uuid));
  const kubeletAnswers = up.has("kubelet") && (known.size > 0 || !map.devices.length);
  const allocated = kubeletAnswers || devices.some((device) => device.holding.length);
  const ratios = map.gpus.map((gpu) => gpu.reading?.utilization_ratio).filter((ratio) => ratio !== undefined);
  return {
    gpus: up.has("nvml") ? map.gpus.length + map.nameless_gpus.length : null,
    busy: ratios.length ? ratios.filter((ratio) => ratio > 0).length : null,
    devices: leaves.length,
    held: allocated ? held : null,
    free: allocated && !unsettled(map) ? leaves.filter((one) => isFree(one) && known.has(one.uuid)).length : null,
    used: pools.length || unified.length ? sum([...pools.map((pool) => pool.memory.used_bytes), ...unified]) : null,
    total: pools.length && !unified.length ? sum(pools.map((pool) => pool.memory.total_bytes)) : null,
    unattributed: pools.length ? sum(pools.map(unattributed)) : null,
  };
}

/** Return whether unmatched slots may belong to a device of this node. Passed-through devices do not. */
export const unsettled = (map) => map.unmatched.some((row) => row.reason !== "not_in_nvml");

/** Count shared memory once: compute instances of one GPU instance share it. */
function poolsOf(leaves) {
  const pools = new Map();
  for (const leaf of leaves.filter((one) => one.memory)) {
    const key = leaf.mig ? `${leaf.gpu_uuid} ${leaf.mig.gpu_instance_id}` : leaf.uuid;
    const pool = pools.get(key) ?? { memory: leaf.memory, uses: [] };
    pool.uses.push(...leaf.owners.values());
    pools.set(key, pool);
  }
  return [...pools.values()];
}

/** Bytes without a known owner. Negative remainders (shared memory) do not reduce those of other devices. */
function unattributed({ memory, uses }) {
  const bytesOf = (wanted) => sum(uses.filter(({ owner }) => wanted(owner)).map((use) => use.memory_bytes ?? 0));
  const unknown = bytesOf((owner) => owner === "unknown");
  return unknown + Math.max(0, memory.used_bytes - unknown - bytesOf((owner) => !NOT_OWN.has(owner)));
}
