// The sums of the overview. A sum is null if nothing of it is known.

import { gpusOf } from "./model.js";

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const NOT_OWN = new Set(["unaccounted", "sibling", "unknown"]);

/** Return the memory of all processes of a device that does not report its own memory; null if none is known. */
export const listedBytes = (device) =>
  device.memory ? null : sum([...device.owners.values()].map((use) => use.memory_bytes ?? 0)) || null;

/** Return the memory of a whole GPU, as its line shows it. */
export const memoryOf = (line) => line.gpu?.reading?.memory ?? (line.devices.length === 1 ? line.devices[0].memory : null);

export function totals(map, devices) {
  const up = new Set(map.sources.filter((source) => source.up).map((source) => source.source));
  // Devices that a container can be assigned: MIG devices, and GPUs without partitions.
  const leaves = devices.filter((device) => !device.bare && !device.partitioned);
  const memories = gpusOf(devices).map(memoryOf).filter(Boolean);
  const unified = leaves.map(listedBytes).filter((bytes) => bytes !== null);
  const known = leaves.filter((leaf) => Number.isInteger(leaf.holders));
  const freeRatios = leaves.map((leaf) => leaf.free_ratio).filter(Number.isFinite);
  const ratios = map.gpus.map((gpu) => gpu.reading?.utilization_ratio).filter(Number.isFinite);
  return {
    gpus: up.has("nvml") ? map.gpus.length + map.nameless_gpus.length : null,
    busy: ratios.length ? ratios.filter((ratio) => ratio > 0).length : null,
    devices: leaves.length,
    held: known.length || !leaves.length ? known.filter((leaf) => leaf.holders > 0).length : null,
    free: freeRatios.length ? freeRatios.filter((ratio) => ratio === 1).length : null,
    partly: freeRatios.filter((ratio) => ratio > 0 && ratio < 1).length,
    used: memories.length || unified.length ? sum([...memories.map((memory) => memory.used_bytes), ...unified]) : null,
    total: memories.length && !unified.length ? sum(memories.map((memory) => memory.total_bytes)) : null,
    unattributed: memories.length ? sum(poolsOf(leaves).map(unattributed)) : null,
  };
}

/** Count shared memory once: compute instances of one GPU instance share it. */
function poolsOf(leaves) {
  const pools = new Map();
  for (const leaf of leaves.filter((device) => device.memory)) {
    const key = leaf.mig ? `${leaf.gpu_uuid} ${leaf.mig.gpu_instance_id}` : leaf.uuid;
    const pool = pools.get(key) ?? { memory: leaf.memory, uses: [] };
    pool.uses.push(...leaf.owners.values());
    pools.set(key, pool);
  }
  return [...pools.values()];
}

/** Bytes without a known owner. Negative remainders (shared memory) do not reduce those of other devices. */
function unattributed({ memory, uses }) {
  const bytesOf = (isCounted) => sum(uses.filter(({ owner }) => isCounted(owner)).map((use) => use.memory_bytes ?? 0));
  const unknown = bytesOf((owner) => owner === "unknown");
  return unknown + Math.max(0, memory.used_bytes - unknown - bytesOf((owner) => !NOT_OWN.has(owner)));
}
