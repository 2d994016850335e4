// The sums of the overview. A sum is null if nothing of it is known.

const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const NOT_OWN = new Set(["unaccounted", "sibling", "unknown"]);

/** Return the memory of all processes of a device that does not report its own memory; null if none is known. */
export const listedBytes = (device) =>
  device.memory ? null : sum([...device.owners.values()].map((use) => use.memory_bytes ?? 0)) || null;

/** Return whether certainly no container holds the device, as in `gpumap_device_holders`. */
export const isFree = (device) => device.holders === 0 && !device.may_have_more;

export function totals(map, devices) {
  const up = new Set(map.sources.filter((one) => one.up).map((one) => one.source));
  // Devices that a container can be assigned: MIG devices, and GPUs without partitions.
  const leaves = devices.filter((device) => !device.bare && !device.partitioned);
  const pools = poolsOf(leaves);
  const unified = leaves.map(listedBytes).filter((one) => one !== null);
  const known = leaves.filter((one) => Number.isInteger(one.holders));
  const listed = known.filter((one) => one.gpu);
  const ratios = map.gpus.map((gpu) => gpu.reading?.utilization_ratio).filter(Number.isFinite);
  return {
    gpus: up.has("nvml") ? map.gpus.length + map.nameless_gpus.length : null,
    busy: ratios.length ? ratios.filter((ratio) => ratio > 0).length : null,
    devices: leaves.length,
    held: known.length || !leaves.length ? known.filter((one) => one.holders > 0).length : null,
    free: listed.length ? listed.filter(isFree).length : null,
    used: pools.length || unified.length ? sum([...pools.map((pool) => pool.memory.used_bytes), ...unified]) : null,
    total: pools.length && !unified.length ? sum(pools.map((pool) => pool.memory.total_bytes)) : null,
    unattributed: pools.length ? sum(pools.map(unattributed)) : null,
  };
}

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
