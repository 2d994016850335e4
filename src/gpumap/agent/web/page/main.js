// Assembles the page from the address, the data of the feed, and the actions of the reader.

import { fill, h } from "./dom.js";
import { EVERY_MS, Feed } from "./feed.js";
import { Curves } from "./curves.js";
import { attention } from "./attention.js";
import { devicesOf, filtered, filteredProcesses, gpusOf, processesOf, TERMS } from "./model.js";
import { COLUMNS as DEVICE_COLUMNS, ORDERS } from "./devices.js";
import { strip } from "./strip.js";
import { processesView, COLUMNS as PROCESS_COLUMNS } from "./processes.js";
import { health, nodeLine, overview } from "./summary.js";
import { reasons } from "./reasons.js";
import { count, duration, moment, printable } from "./words.js";

const $ = (id) => document.getElementById(id);
const FIRST = { devices: "attention", processes: "-used" };
const state = {
  view: "devices",
  query: "",
  sort: "attention",
  device: null, // that the reader came for
  row: "", // of it
  opened: new Map(), // GPUs and MIG devices that the reader opened or closed
  open: new Set(), // devices whose table is shown whole
  all: false, // whether all that needs attention is shown
};
const feed = new Feed(() => {
  draw();
  tick();
});
const SAID = { lost: "The agent does not answer", late: "Old data" };
let sought = false; // whether the device of the address is still to be scrolled to
let lastState = "";

const columns = () => (state.view === "processes" ? PROCESS_COLUMNS : [...ORDERS, ...DEVICE_COLUMNS]);

// --- the address -----------------------------------------------------------------------------------------------------

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const device = [...given.keys()].find((key) => /^(GPU|MIG)-/.test(key)) ?? null;
  state.view = given.get("view") === "processes" ? "processes" : "devices";
  state.query = given.get("q") ?? "";
  const sort = given.get("sort") ?? "";
  state.sort = columns().some(({ id }) => id === sort.replace(/^-/, "")) ? sort : FIRST[state.view];
  sought = device !== null;
  state.device = device;
  state.row = (device && given.get("row")) || "";
  state.opened = new Map(device ? [[device, true]] : []);
  if ($("filter").value !== state.query) $("filter").value = state.query;
}

function writeAddress(push) {
  const given = new URLSearchParams();
  if (state.view !== "devices") given.set("view", state.view);
  if (state.query) given.set("q", state.query);
  if (state.sort !== FIRST[state.view]) given.set("sort", state.sort);
  if (state.row) given.set("row", state.row);
  const hash = [state.device, given.toString()].filter(Boolean).join("&");
  const address = hash ? `#${hash}` : location.pathname + location.search;
  history[push ? "pushState" : "replaceState"](null, "", address);
}

// --- drawing ---------------------------------------------------------------------------------------------------------

function draw() {
  const map = feed.document;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  drawSorting();
  if (!map) {
    const waiting = `Waiting for the agent${feed.why ? `: ${feed.why}` : ""} …`;
    fill($("content"), h("p", { class: "empty" }, feed.state === "starting" ? waiting : "No data yet."));
    return;
  }
  document.title = `${printable(map.name)} · gpumap`;
  document.body.classList.toggle("asked", state.query !== "" || state.view !== "devices");
  fill($("node"), nodeLine(map));
  const devices = devicesOf(map);
  const context = {
    map,
    state,
    all: gpusOf(devices),
    why: reasons(map),
    curves: new Curves(feed.history, map.timestamp),
  };
  const old = tooOld(map);
  fill($("attention"), attention(map, devices, old, state));
  fill($("overview"), old ? [] : overview(map, devices));
  fill($("health"), health(map));
  const content = state.view === "processes" ? drawProcesses(devices, context) : drawDevices(devices, context);
  fill($("content"), content);
  feed.showCurves(document.querySelector(".details") !== null);
  if (sought) seek();
}

/** Return why a document has no current data; null if it has. */
function tooOld(map) {
  const age = duration(feed.ageNow());
  if (map.stale) return `the last collection is ${age} old, too old to show: ${map.stale}`;
  const nvml = map.sources.find((source) => source.source === "nvml");
  if (map.gpus.length || map.nameless_gpus.length || map.devices.length || (nvml?.up && !feed.isLate())) return null;
  return feed.isLate()
    ? `the agent answers, but its last collection is ${age} old, too old to show`
    : "no source reports a device now";
}

function drawDevices(devices, context) {
  const matching = filtered(devices, state.query).map((device) => ({
    ...device,
    allRows: devices.find((other) => other.uuid === device.uuid).rows,
  }));
  const isHere = !state.device || [...context.map.gpus, ...devices].some((device) => device.uuid === state.device);
  const lost = isHere ? "" : `No device ${state.device} here`;
  say("found", state.query ? `${matching.length} of ${count(devices.length, "device")}` : lost);
  if (!devices.length) return h("p", { class: "empty" }, "No device is known.");
  if (!matching.length) return h("p", { class: "empty" }, `No GPU matches the filter. Filter by words, and by ${TERMS}`);
  return strip(gpusOf(matching), context);
}

function drawProcesses(devices, context) {
  const all = processesOf(devices);
  const matching = filteredProcesses(all, state.query);
  say("found", state.query ? `${matching.length} of ${count(all.length, "process", "processes")}` : "");
  return processesView(matching, context);
}

function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function drawSorting() {
  const value = state.sort.replace("-", "");
  fill($("sort"), columns().map(({ id, title }) => h("option", { key: id, value: id }, title)));
  if ($("sort").value !== value) $("sort").value = value;
}

function seek() {
  sought = false;
  const device = document.getElementById(state.device);
  if (device) {
    const row = state.row ? device.querySelector("tr[aria-current]") : null;
    device.scrollIntoView({ behavior: "instant" });
    row?.scrollIntoView({ behavior: "instant", block: "nearest" }); // with its GPU above, if both fit
    (row ?? device).focus({ preventScroll: true });
  } else say("said", `No device ${state.device} here`);
}

/** Update what changes only with time. */
function tick() {
  const age = feed.ageNow();
  const late = feed.isLate();
  const shown = feed.state === "lost" ? "lost" : late ? "late" : feed.state;
  $("feed").dataset.state = shown;
  document.body.classList.toggle("stale", shown === "lost" || shown === "late");
  say("age", age === null ? (feed.state === "lost" ? "no answer" : "connecting") : `data ${duration(age)} old`);
  if (feed.document) $("feed").title = `measured ${moment(feed.document.timestamp)}`;
  if (shown === "lost") {
    const old = age === null ? "" : `This data is ${duration(age)} old. `;
    fill($("lost"), [h("strong", {}, SAID.lost), `: ${feed.why}. ${old}The page asks again every ${EVERY_MS / 1000} s.`]);
  } else if (late) {
    fill($("lost"), [h("strong", {}, SAID.late), `: the agent answers, but its data is ${duration(age)} old.`]);
  }
  $("lost").hidden = shown !== "lost" && shown !== "late";
  if (shown !== lastState) {
    if (SAID[shown] || SAID[lastState]) say("said", SAID[shown] ?? "The data is current again");
    lastState = shown;
    if (feed.document) draw();
  }
}

// --- what the reader does --------------------------------------------------------------------------------------------

function setQuery(query) {
  state.query = query;
  state.opened.clear();
  $("filter").value = query;
  writeAddress(false);
  draw();
}

function sortBy(id) {
  const rising = id === "pid" || !columns().find((column) => column.id === id).number;
  const first = rising ? id : `-${id}`;
  const other = rising ? `-${id}` : id;
  state.sort = state.sort === first && id !== "attention" ? other : first;
  writeAddress(false);
  draw();
}

async function copy(button) {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // not over plain HTTP: let the browser copy a selection
    getSelection().selectAllChildren(button);
    document.execCommand("copy");
  }
  say("said", `Copied ${text}`);
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 1200);
}

/** Open or close a GPU. The address names the GPU that was opened last. */
function toggle(uuid) {
  const opens = !document.getElementById(uuid).classList.contains("open");
  state.opened.set(uuid, opens);
  Object.assign(state, { device: opens ? uuid : null, row: "" });
  writeAddress(false);
  draw();
}

document.addEventListener("click", (event) => {
  const line = event.target.closest(".gpu > .line");
  const button = event.target.closest("button") ?? (event.target.closest("a") ? null : line?.querySelector("button"));
  if (!button) return;
  const { sort, open, toggle: gpu, all } = button.dataset;
  if (sort) sortBy(sort);
  else if (gpu) toggle(gpu);
  else if (open) {
    if (!state.open.delete(open)) state.open.add(open);
    draw();
  } else if (all !== undefined) {
    state.all = !state.all;
    draw();
  } else if (button.dataset.copy) copy(button);
  else if (button.className === "unknown") {
    $("why").textContent = button.title;
    $("why").showPopover();
  }
});

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("filter").select();
    $("filter").focus();
  } else if (event.key === "Escape" && !$("why").matches(":popover-open")) {
    $("filter").blur();
    if (!state.query && !state.device) return;
    Object.assign(state, { device: null, row: "" });
    setQuery("");
  }
});

$("filter").addEventListener("input", () => {
  setQuery($("filter").value);
});
$("sort").addEventListener("change", () => sortBy($("sort").value));
document.querySelector("nav").addEventListener("click", (event) => {
  const view = event.target.closest("a")?.dataset.view;
  if (!view || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  Object.assign(state, { view, sort: FIRST[view], device: null, row: "" });
  writeAddress(true);
  draw();
});
for (const change of ["hashchange", "popstate"])
  window.addEventListener(change, () => {
    readAddress();
    draw();
  });

readAddress();
draw();
setInterval(tick, 1000);
feed.wake();
