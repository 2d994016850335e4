// The last hour as small SVG curves. Unknown values are gaps.

import { h } from "./dom.js";
import { bytes, duration, percent } from "./words.js";

const HEIGHT = 20;
const FEWEST = 4; // buckets of which a curve can be drawn
const MIB = 2 ** 20;

/** The history by device and container, its values up to now. */
export class Curves {
  constructor(history, now) {
    this.buckets = history?.buckets ?? 120;
    this.seconds = history?.bucket_seconds ?? 30;
    this.series = new Map();
    const missing = history
      ? Math.min(this.buckets, Math.max(0, Math.floor((now - history.timestamp) / this.seconds)))
      : 0;
    const gap = new Array(missing).fill(null);
    for (const one of history?.series ?? []) {
      const key = keyOf(one.uuid, one.pod === null ? null : one);
      this.series.set(key, { memory: one.memory_mib.concat(gap), sm: one.sm_permille.concat(gap) });
    }
  }

  /** Return how a curve sums up a bucket, in words. */
  of(kind) {
    return `${kind} of ${duration(this.seconds)}`;
  }

  memory(uuid, row, { most, granted }) {
    const values = this.series.get(keyOf(uuid, row))?.memory ?? [];
    return this.draw(values, {
      name: "Memory",
      kind: "maximum",
      most: most / MIB,
      mark: granted ? granted / MIB : null,
      say: (mib) => bytes(mib * MIB),
    });
  }

  sm(uuid, row, name = "SM") {
    const values = this.series.get(keyOf(uuid, row))?.sm ?? [];
    return this.draw(values, { name, kind: "mean", most: row ? 0 : 1000, mark: null, say: (permille) => percent(permille / 1000) });
  }

  /** Draw the known values, from the first one on. */
  draw(values, { name, kind, most, mark, say }) {
    const recent = values.slice(-this.buckets);
    const known = recent.slice(Math.max(0, recent.findIndex((value) => value !== null)));
    const knownValues = known.filter((value) => value !== null);
    if (knownValues.length < FEWEST) return null;
    const highest = Math.max(...knownValues);
    const scale = Math.max(most, highest, mark !== null && mark < 2 * highest ? mark : 0) || 1;
    const width = known.length - 1;
    const y = (value) => (HEIGHT - 1.5 - (value / scale) * (HEIGHT - 3)).toFixed(1);
    const unknown = (known.length - knownValues.length) * this.seconds;
    const label =
      `${name}, ${this.of(kind)}, last ${known.length > this.buckets - 3 ? "hour" : duration(known.length * this.seconds)}: ` +
      `highest ${say(highest)}, lowest ${say(Math.min(...knownValues))}` +
      (unknown ? `, unknown for ${duration(unknown)}` : "");
    const runs = pieces(known);
    const line = runs.map((run) => `M${run.from} ${y(run.values[0])}` + rest(run, y)).join("");
    return h(
      "svg",
      {
        class: `curve ${name === "Memory" ? "of-memory" : "of-sm"}`,
        viewBox: `0 0 ${width} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": label,
      },
      h("title", {}, label),
      h("path", { class: "area", d: runs.map((run) => area(run, y)).join("") }),
      mark !== null && mark <= scale && h("path", { class: "mark", d: `M0 ${y(mark)}H${width}` }),
      h("path", { class: "line", d: line }),
    );
  }
}

const keyOf = (uuid, row) => (row ? JSON.stringify([uuid, row.namespace, row.pod, row.container]) : uuid);

function pieces(values) {
  const found = [];
  values.forEach((value, at) => {
    if (value === null) return;
    if (at && values[at - 1] !== null) found.at(-1).values.push(value);
    else found.push({ from: at, values: [value] });
  });
  return found;
}

const rest = (run, y) =>
  run.values.length > 1
    ? run.values
        .slice(1)
        .map((value, at) => `L${run.from + at + 1} ${y(value)}`)
        .join("")
    : "h.6";

const area = (run, y) =>
  `M${run.from} ${HEIGHT}` +
  run.values.map((value, at) => `L${run.from + at} ${y(value)}`).join("") +
  `V${HEIGHT}Z`;
