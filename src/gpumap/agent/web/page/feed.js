// Asks the agent repeatedly and knows the age of its answer. It pauses while the page is hidden.

export const EVERY_MS = 2000; // at the most, and while the agent does not answer
const LONGEST_WAIT_MS = 30000;
const PATIENCE_MS = 8000;
const HISTORY_EVERY_MS = 60000;
const LATE_SECONDS = 12; // a collection may take a while, however often it is made

const isMap = (body) => body?.version === 1 && Array.isArray(body.devices);
const isHistory = (body) => body?.version === 1 && Array.isArray(body.series);

export class Feed {
  constructor(changed) {
    this.changed = changed;
    this.document = null;
    this.history = null;
    this.state = "starting"; // then "live" or "lost"
    this.why = "";
    this.tags = {};
    this.age = null; // of the document, in seconds, when it was last confirmed
    this.confirmedAt = 0;
    this.interval = null; // between the agent's collections, as it says
    this.historyAt = -Infinity;
    this.wantsHistory = false; // whether curves are to be seen
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.wake());
    window.addEventListener("online", () => this.wake());
  }

  wake() {
    clearTimeout(this.timer);
    if (!document.hidden) this.ask();
  }

  /** Milliseconds between two requests: two in each interval, within limits. */
  pace() {
    if (this.state !== "live") return EVERY_MS;
    return Math.min(LONGEST_WAIT_MS, Math.max(EVERY_MS, (this.interval ?? 0) * 500));
  }

  /** Fetch the history while curves are visible; the first time immediately. */
  showCurves(shown) {
    this.wantsHistory = shown;
    if (shown && this.history === null && this.historyAt === -Infinity && !this.asking) this.wake();
  }

  /** Return the age of the data in seconds, by the agent's clock; null without data. */
  ageNow() {
    return this.age === null ? null : this.age + (performance.now() - this.confirmedAt) / 1000;
  }

  /** Return whether the agent answers, but with old data. */
  isLate() {
    const age = this.ageNow();
    return this.state === "live" && age !== null && age > Math.max(LATE_SECONDS, 3 * (this.interval ?? 0) + 2);
  }

  async ask() {
    clearTimeout(this.timer);
    if (this.asking || document.hidden) return;
    this.asking = true;
    try {
      await this.askMap();
      if (this.wantsHistory && performance.now() - this.historyAt > HISTORY_EVERY_MS) await this.askHistory();
    } finally {
      this.asking = false;
    }
    if (!document.hidden) this.timer = setTimeout(() => this.ask(), this.pace());
    this.changed();
  }

  async askMap() {
    try {
      const { response, body } = await this.fetch("api/v1/map", isMap);
      if (body) {
        this.document = body;
        this.interval = body.interval_seconds;
      }
      const served = Date.parse(response.headers.get("Date") ?? "") || Date.now();
      this.age = Math.max(0, served / 1000 - this.document.timestamp);
      this.confirmedAt = performance.now();
      this.state = "live";
      this.why = "";
    } catch (error) {
      this.why = reason(error);
      this.state = this.document === null && error.starting ? "starting" : "lost";
    }
  }

  async askHistory() {
    this.historyAt = performance.now();
    try {
      const { body } = await this.fetch("api/v1/history", isHistory);
      if (body) this.history = body;
    } catch {
      // curves are optional: keep the old ones; the map shows whether the agent answers
    }
  }

  /** Return an answer and its body; null if nothing changed since the last accepted answer. */
  async fetch(path, isWanted) {
    const headers = this.tags[path] ? { "If-None-Match": this.tags[path] } : {};
    const response = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (response.status === 304) return { response, body: null };
    if (!response.ok) {
      const text = (await response.text()).split("\n")[0].slice(0, 200);
      throw Object.assign(new Error(`${response.status} ${text}`), { starting: text.includes("first collection") });
    }
    const type = response.headers.get("Content-Type") ?? "";
    if (!type.startsWith("application/json"))
      throw new Error("another server answered, perhaps with a login page");
    const body = await response.json();
    if (!isWanted(body)) throw new Error("the answer is not from gpumap");
    this.tags[path] = response.headers.get("ETag");
    return { response, body };
  }
}

function reason(error) {
  if (error.starting) return "the first collection is not finished";
  if (error.name === "TimeoutError") return `no answer within ${PATIENCE_MS / 1000} s`;
  if (error instanceof TypeError) return "no connection";
  return error.message;
}
