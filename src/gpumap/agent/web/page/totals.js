// What the overview counts. Each number rests on what is known; null where that is nothing.

const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const NOT_OWN = new Set(["unaccounted", "sibling", "unknown"]);

/** What can be given away: no partitioned GPU, of which one gives the instances, or all of them at once. */
const leavesOf = (devices) => devices.filter((device) => !device.bare && !device.parent);

const isHeld = (device) => device.holders.length > 0 || device.whole.length > 0;

/** Whether a process is known on it, whoever its owner is. */
export const isUsed = (device) => device.rows.some((row) => row.processes.length > 0);

/** Certainly to be had: read, not held, not in use, and no slots are left whose device is not known. */
const isFree = (device) => device.memory && !isHeld(device) && !isUsed(device);

/** GPUs that are down; those that never told their uuid stand nowhere else. */
export const downGpus = (map) => [...map.gpus.filter((gpu) => !gpu.up), ...map.nameless_gpus];

export function totals(map, devices) {
  const up = new Set(map.sources.filter((one) => one.up).map((one) => one.source));
  const leaves = leavesOf(devices);
  const pools = poolsOf(leaves);
  const held = leaves.filter(isHeld).length;
  const known = new Set(map.devices.filter((one) => one.holders_known).map((one) => one.uuid));
  const toldNow = up.has("kubelet") && (known.size > 0 || !map.devices.length);
  const allocated = toldNow || devices.some((device) => device.holders.length);
  const ratios = map.gpus.map((gpu) => gpu.utilization_ratio).filter((ratio) => ratio !== null);
  return {
    gpus: up.has("nvml") ? map.gpus.length + map.nameless_gpus.length : null,
    busy: ratios.length ? ratios.filter((ratio) => ratio > 0).length : null,
    devices: leaves.length,
    held: allocated ? held : null,
    free: allocated && !unsettled(map) ? leaves.filter((one) => isFree(one) && known.has(one.uuid)).length : null,
    used: pools.length ? sum(pools.map((pool) => pool.memory.used_bytes)) : null,
    total: pools.length ? sum(pools.map((pool) => pool.memory.total_bytes)) : null,
    unattributed: pools.length ? sum(pools.map(unattributed)) : null,
  };
}

/** Whether slots that are on no device may be of one that is here: what is passed through is not. */
export const unsettled = (map) => map.unmatched.some((row) => row.reason !== "not_in_nvml");

/** Memory that is there once: compute instances of one GPU instance share theirs. */
function poolsOf(leaves) {
  const pools = new Map();
  for (const leaf of leaves.filter((one) => one.memory)) {
    const key = leaf.gpu_instance_id === null ? leaf.uuid : `${leaf.gpu_uuid} ${leaf.gpu_instance_id}`;
    const pool = pools.get(key) ?? { memory: leaf.memory, uses: [] };
    pool.uses.push(...leaf.owners.values());
    pools.set(key, pool);
  }
  return [...pools.values()];
}

/** Bytes of no known owner. Where processes share memory more is told than used: that makes up for nothing elsewhere. */
function unattributed({ memory, uses }) {
  const told = (wanted) => sum(uses.filter(({ owner }) => wanted(owner)).map((use) => use.memory_bytes ?? 0));
  const unknown = told((owner) => owner === "unknown");
  return unknown + Math.max(0, memory.used_bytes - unknown - told((owner) => !NOT_OWN.has(owner)));
}
