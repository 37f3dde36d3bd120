"use strict";
// Draws snapshots (shmring.RingSnapshot), one a second. Texts of callers are only ever set as textContent.
const ROWS = 12; // of the drawn slab
const SERIES = 180; // points of a plot: three minutes
const KEPT_USES = 2 ** 63; // generations of kept content that is in use begin here
const LATE_S = 1, RECENT_S = 5; // of a loop: how late, and how long ago, it is marked
const OLD_S = 30; // from which a request or a slot is marked
const STATES = { leased: "leased, not in a slot", published: "submitted", claimed: "claimed", draining: "left, still viewed",
  quarantined: "of a frontend that is gone", kept: "kept", kept_pinned: "kept, in use", replies: "for replies", free: "free" };
const $ = id => document.getElementById(id);
const color = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const bytes = n => !n ? "0" : n >= 2 ** 30 ? (n / 2 ** 30).toFixed(2) + " GiB" : n >= 2 ** 20 ? (n / 2 ** 20).toFixed(1) + " MiB" : (n / 1024).toFixed(0) + " KiB";
const seconds = s => s < 1 ? "< 1 s" : s < 120 ? s.toFixed(0) + " s" : (s / 60).toFixed(0) + " min";
const taken = s => s < 10 ? s.toFixed(2) + " s" : s < 120 ? s.toFixed(1) + " s" : (s / 60).toFixed(0) + " min";
const milliseconds = s => `${(1000 * s).toFixed(0)} ms`;
const percent = share => (100 * share).toFixed(share < .1 ? 1 : 0) + " %";
const quantile = (values, share) => values.length ? [...values].sort((a, b) => a - b)[Math.min(values.length - 1, Math.floor(share * values.length))] : 0;
let key = "", paused = false, shown = null, shownAt = "", silence = null, before = null, chosen = -1, series = {};

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function context(canvas) {
  const ratio = devicePixelRatio;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  return canvas.getContext("2d");
}

// -- the slab: rows of blocks, one below the other -----------------------------------------------------------------------

const isSlot = run => run[4] !== 0;
const runs = () => shown ? [...shown.runs].sort((a, b) => isSlot(a) - isSlot(b) || a[0] - b[0]) : []; // slots lie on their leases

function drawSlab() {
  if (!shown) return;
  const canvas = $("slab"), brush = context(canvas), { width, height } = canvas, row = height / ROWS, per = shown.blocks / ROWS;
  brush.fillStyle = color("free");
  brush.fillRect(0, 0, width, height);
  const fill = ([start, blocks], inset) => {
    for (let at = start, end = start + blocks; at < end;) {
      const r = Math.min(ROWS - 1, Math.floor(at / per)), stop = Math.min(end, (r + 1) * per);
      brush.fillRect((at - r * per) / per * width, r * row + inset, Math.max(2, (stop - at) / per * width), row - 2 * inset);
      if (stop <= at) break;
      at = stop;
    }
  };
  for (const run of runs()) { brush.fillStyle = color(run[2]); fill(run, isSlot(run) ? 2 : 1); }
  const run = runs()[chosen];
  if (run) { brush.fillStyle = color("fg"); fill(run, row / 2 - 1); }
}

function describe(run) {
  if (!run) return "";
  const [start, blocks, state, client, generation] = run;
  const owner = shown.clients.find(each => each.client_id === client);
  // Numbers above 2^53 are rounded here. The client tells most of those apart; many uses of kept content are the same number.
  const found = !client ? [] : [...shown.requests.filter(each => each.client_id === client && each.slots.includes(generation)),
    ...shown.draining.filter(each => each.client_id === client && each.generation === generation)];
  const isAll = shown.requests.length === shown.request_count && shown.draining.length === shown.draining_count;
  const request = generation < KEPT_USES || (isAll && found.length === 1) ? found[0] : null;
  return [`${STATES[state]}: blocks ${start} to ${start + blocks - 1}, ${bytes(blocks * shown.block_nbytes)}`,
    client ? `frontend ${client}${owner ? ` (${owner.name || "unnamed"}, pid ${owner.pid})` : ""}` : "",
    request && generation ? `request ${request.name || request.request || request.number || "unknown"}, ${seconds(request.age_s)}` : ""].filter(Boolean).join("; ");
}

$("slab").addEventListener("pointermove", event => {
  if (!shown) return;
  const box = $("slab").getBoundingClientRect(), per = shown.blocks / ROWS;
  const at = Math.floor((event.clientY - box.top) / box.height * ROWS) * per + (event.clientX - box.left) / box.width * per;
  chosen = runs().findLastIndex(([start, blocks]) => at >= start && at < start + blocks);
  $("run").textContent = chosen < 0 ? `free: block ${Math.floor(at)}` : describe(runs()[chosen]);
  drawSlab();
});
$("slab").addEventListener("keydown", event => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key], count = runs().length;
  if (!step || !count) return;
  event.preventDefault();
  chosen = ((chosen < 0 ? (step > 0 ? -1 : 0) : chosen) + step + count) % count;
  $("run").textContent = describe(runs()[chosen]);
  drawSlab();
});

// -- numbers, plots, tables -----------------------------------------------------------------------------------------------

function drawTiles() {
  const now = shown.statistics, program = shown.program;
  const step = !program.executor ? null : program.step ? `${program.step.what}, ${seconds(program.step.age_s)}` : program.paused ? "paused" : program.running + program.preparing_requests ? "between steps" : "idle";
  const ofRing = [["requests running", now.running], ["not yet claimed", now.waiting]];
  const ofSteps = [["running", program.running], ["seats taken", `${program.seats_taken} of ${program.seats}`], ["preparing form or prompt", program.preparing_requests], ["paused: others' turn", program.paused_requests],
    ["waiting in line", program.waiting, program.waiting > 0 && program.paused], ["preparing in frontends", program.preparing], ["not yet taken up", now.waiting], ["at work on", step, program.step && program.step.age_s > OLD_S]];
  drawFigures("tiles", [...(program.requests ? ofSteps : ofRing), ["failed so far", now.failed], ["aborted so far", now.aborted], ["protocol errors", now.protocol_errors, now.protocol_errors > 0]]);
  drawFigures("memory", [["slab free", bytes(now.free_nbytes)], ["leased", bytes(now.leased_nbytes)], ["kept", bytes(now.kept_nbytes)], ["quarantined", bytes(now.quarantined_nbytes), now.quarantined_nbytes > 0],
    ["waiting for memory", now.lease_requests_waiting, now.lease_requests_waiting > 0], ["slots draining", now.slots_draining]]);
}

function drawFigures(id, figures) {
  $(id).replaceChildren(...figures.filter(([, value]) => value !== null && value !== undefined).map(([name, value, alarm]) => {
    const tile = element("div");
    tile.append(element("dt", name), element("dd", value, alarm ? "alarm" : ""));
    return tile;
  }));
}

function plot(name, value, unit) {
  const points = series[name] ||= [];
  points.push(value);
  if (points.length > SERIES) points.shift();
  let figure = [...$("plots").children].find(each => each.dataset.name === name);
  if (!figure) {
    figure = element("figure");
    figure.dataset.name = name;
    const caption = element("figcaption");
    caption.append(element("span", name), element("b"));
    figure.append(caption, element("canvas"));
    $("plots").append(figure);
  }
  figure.querySelector("b").textContent = `${value.toFixed(value < 10 ? 2 : 0)} ${unit}`;
  const canvas = figure.querySelector("canvas"), brush = context(canvas), { width, height } = canvas, top = Math.max(...points) || 1, ratio = devicePixelRatio;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${name}: now ${value.toFixed(2)} ${unit}, at most ${top.toFixed(2)}`);
  brush.strokeStyle = color("claimed");
  brush.lineWidth = 1.5 * ratio;
  brush.beginPath();
  points.forEach((point, i) => brush.lineTo(width - (points.length - 1 - i) * width / SERIES, height - 2 * ratio - point / top * (height - 4 * ratio)));
  brush.stroke();
}

function drawPlots() {
  if (before && before.epoch === shown.epoch && shown.time_s > before.time_s) {
    const rate = read => Math.max(0, (read(shown) - read(before)) / (shown.time_s - before.time_s)), steps = shown.program.steps_s;
    plot("requests finished", rate(each => each.statistics.finished), "/s");
    plot("into the slab", rate(each => each.statistics.received_nbytes) / 1e6, "MB/s");
    if (steps) {
      plot("tokens", rate(each => each.program.generated_tokens), "/s");
      plot("step, p50", 1e3 * quantile(steps, .5), "ms");
      plot("step, p99", 1e3 * quantile(steps, .99), "ms");
    }
  }
  before = shown;
}

function words(cell, kind) {
  const made = element("td", cell, kind);
  made.title = cell;
  return made;
}

function bar(share) { // the number stands beside it
  const made = element("td", undefined, "bar"), length = element("span");
  length.style.width = `${(100 * Math.min(1, share)).toFixed(1)}%`;
  made.setAttribute("aria-hidden", "true");
  made.append(length);
  return made;
}

function table(id, columns, rows, total, nothing) {
  const body = $(id), head = element("tr");
  head.append(...columns.map(([name, kind]) => { const made = element("th", name, kind); made.scope = "col"; if (kind === "bar") made.setAttribute("aria-hidden", "true"); return made; }));
  const lines = rows.map(([cells, alarm]) => {
    const line = element("tr", undefined, alarm ? "alarm" : "");
    line.append(...cells.map((cell, i) => columns[i][1] === "bar" ? bar(cell) : words(cell, columns[i][1])));
    return line;
  });
  if (!lines.length) { const line = element("tr"), cell = element("td", nothing, "none"); cell.colSpan = columns.length; line.append(cell); lines.push(line); }
  const header = element("thead"), content = element("tbody");
  header.append(head);
  content.append(...lines);
  body.replaceChildren(...(rows.length ? [header] : []), content);
  body.closest("section").querySelector(".count").textContent = total > rows.length ? `${rows.length} of ${total}` : rows.length ? rows.length : "";
}

function drawSpending(spending) {
  $("spending-section").hidden = !spending;
  if (!spending) return;
  $("cause").textContent = `${spending.cause} ${spending.whose}`;
  const { loop_lag_s, loop_lag_ago_s, frontend_lags } = shown.program, lags = [["the engine", [loop_lag_s, loop_lag_ago_s]], ...Object.entries(frontend_lags)];
  const late = (lag, ago) => `${lag < 1 ? milliseconds(lag) : taken(lag)}${lag < .001 ? "" : `, ${seconds(ago)} ago`}`;
  const alarm = lags.some(([, [lag, ago]]) => lag >= LATE_S && ago < RECENT_S);
  $("lag").textContent = `The loop of ${lags.map(([who, [lag, ago]]) => `${who} was late by ${late(lag, ago)}`).join("; that of ")}.${alarm ? " Callers wait while a loop is late." : ""}`;
  $("lag").className = alarm ? "alarm" : "";
  const idle = Math.max(0, 1 - spending.steps);
  table("spending", [["share", "number"], ["", "bar"], ["of the time; what other threads do comes on top", "text"]],
    [...spending.parts, { what: "no step ran", share: idle }].map(part => [[percent(part.share), part.share, part.what], false]), 0, "");
  $("spending-section").querySelector(".count").textContent = `in the last ${spending.over_s.toFixed(0)} s`;
}

function drawCallers(callers) {
  $("callers-section").hidden = !callers;
  if (!callers) return;
  table("callers", [["caller", "text"], ["seconds of steps, last 10 s", "number"], ["of preparation beside them", "number"], ["of decoders", "number"], ["share", "number"], ["", "bar"], ["all, last minute", "number"], ["requests now", "number"]],
    callers.map(c => [[c.owner, taken(c.seconds), taken(c.beside_s), taken(c.decoding_s), percent(c.share), c.share, taken(c.minute_s), c.requests], false]), callers.length, "nobody has used any");
}

function drawRequests(owner) {
  const s = shown, program = s.program, described = program.requests;
  $("seen-by").hidden = !program.seen_by;
  $("seen-by").textContent = `These are the requests of ${program.seen_by}; an admin key shows those of all callers.`;
  const inLine = Object.entries(program.line || {}).map(([who, count]) => `${who} ${count}`).join(", ");
  const some = (count, what) => count ? `, ${count} ${what}` : "";
  $("counts").hidden = !described;
  $("counts").textContent = described ? `${program.running} running${some(program.preparing_requests, "preparing")}${some(program.paused_requests, "paused")}, ${program.waiting} waiting${inLine ? ` (${inLine})` : ""}${some(program.preparing, "being prepared in frontends")}` : "";
  if (!described)
    return table("requests", [["age", "number"], ["state"], ["request", "text"], ["frontend"], ["slots", "number"], ["memory", "number"]],
      s.requests.slice(0, 20).map(r => [[seconds(r.age_s), r.state, r.name || `number ${r.number}`, owner(r.client_id), r.slots.length, bytes(r.nbytes)], r.age_s > OLD_S && r.nbytes > 0]), s.request_count, "none");
  const id = r => `${r.client_id}/${r.number}`, memory = new Map(s.requests.map(r => [id(r), r.nbytes])), known = new Set(described.map(id));
  const all = program.running + program.preparing_requests + program.paused_requests + program.waiting, isAll = !program.seen_by && all === described.length;
  // What the ring has, and the scheduler has not: it comes in a moment, or was answered and its frontend takes no replies.
  const others = isAll ? s.requests.filter(r => !known.has(id(r))) : [];
  const row = (r, state, place, why, owner, prompt, tokens, spent, nbytes) =>
    [[r.name || `number ${r.number}`, state, place, why, owner, prompt, tokens, spent, seconds(r.age_s), nbytes ? bytes(nbytes) : ""], r.age_s > OLD_S && nbytes > 0];
  const rows = described.map(r => row(r, r.state, r.place ?? "", r.why, r.owner, r.prompt_tokens || "", r.tokens || "", taken(r.seconds), memory.get(id(r))));
  for (const r of others)
    rows.push(r.state === "waiting" ? row(r, "arriving", "", "the engine has not taken it up", "", "", "", "", r.nbytes) : row(r, "answered", "", "its frontend takes no replies", "", "", "", "", r.nbytes));
  table("requests", [["request", "text"], ["state"], ["place", "number"], ["what it waits for, or does", "why"], ["caller", "text"], ["prompt tokens", "number"], ["tokens so far", "number"], ["took", "number"], ["age", "number"], ["memory", "number"]],
    rows, program.seen_by ? rows.length : Math.max(all + others.length, rows.length), "none");
}

function drawEnded(ended) {
  $("ended-section").hidden = !ended;
  if (!ended) return;
  table("ended", [["ago", "number"], ["request", "text"], ["how it ended"], ["caller", "text"], ["time", "number"], ["prompt tokens", "number"], ["tokens", "number"], ["took", "number"]],
    ended.map(r => [[seconds(r.ago_s), r.name || "unnamed", r.end, r.owner, taken(r.age_s), r.prompt_tokens || "", r.tokens || "", taken(r.seconds)], false]), ended.length, "none");
}

function drawTables() {
  const s = shown, owner = id => { const client = s.clients.find(each => each.client_id === id); return client ? `client ${id} (pid ${client.pid})` : `client ${id}`; };
  drawSpending(s.program.spending);
  drawCallers(s.program.callers);
  drawRequests(owner);
  drawEnded(s.program.ended);
  table("draining", [["age", "number"], ["request", "text"], ["frontend"], ["generation", "number"], ["memory", "number"]],
    s.draining.slice(0, 20).map(r => [[seconds(r.age_s), r.request || "unknown", owner(r.client_id), r.generation, bytes(r.nbytes)], r.age_s > OLD_S]), s.draining_count, "none");
  $("draining-section").hidden = !s.draining_count;
  table("clients", [["frontend", "text"], ["state"], ["pid", "number"], ["leases", "number"], ["leased", "number"], ["slots", "number"], ["requests", "number"], ["pins", "number"], ["waits for"]],
    s.clients.slice(0, 40).map(c => [[`${c.name || "unnamed"} (client ${c.client_id})`, c.state, c.pid, c.leases, bytes(c.leased_nbytes), c.slots, c.requests, c.pins, c.wants_nbytes ? `${bytes(c.wants_nbytes)}, ${seconds(c.waits_s)}` : ""], c.state !== "connected" || c.waits_s > 2]), s.client_count, "none is connected");
  table("workers", [["rank", "number"], ["pid", "number"], ["state"], ["behind", "number"], ["memory", "number"]],
    s.workers.map(w => [[w.rank, w.pid, w.is_stopped ? "stopped" : w.is_member ? "member" : "left", w.unacknowledged, bytes(w.unacknowledged_nbytes)], w.is_stopped]), s.workers.length, "none");
  $("workers-section").hidden = !s.workers.length;
  table("errors", [["ago", "number"], ["what", "text"]], s.errors.map(e => [[seconds(e.age_s), e.text], false]), s.errors.length, "none");
}

function draw() {
  if (!shown) return;
  $("ring").textContent = shown.name;
  $("size").textContent = `${bytes(shown.blocks * shown.block_nbytes)}, engine pid ${shown.pid}${shown.program.model ? `, ${shown.program.model}` : ""}`;
  drawSlab();
  drawTiles();
  drawTables();
}

// -- the stream -------------------------------------------------------------------------------------------------------------

function say(text, lost) {
  $("live").textContent = text;
  $("live").className = lost ? "lost" : "";
}

// A banner, as long as what is shown is old. Without anything to show, it stands alone.
function drawSilence() {
  $("banner").hidden = !silence;
  $("banner").textContent = silence ? `${silence()}${shown ? ` What you see is from ${shownAt}.` : ""}` : "";
  document.querySelector("main").className = silence ? "stale" : "";
  document.querySelector("main").hidden = !shown;
}

function miss(text) {
  silence = text;
  drawSilence();
  say("not live", true);
}

function choose(names) {
  const select = $("engine");
  if (select.length !== names.length) select.replaceChildren(...names.map(name => new Option(name, name)));
  $("choice").hidden = names.length < 2;
  return select.value;
}

function hear(engines) {
  const snapshot = engines[choose(Object.keys(engines))];
  if (snapshot.error) {
    const since = Date.now() - 1000 * snapshot.silent_s, pid = snapshot.pid ? ` (pid ${snapshot.pid})` : "";
    return miss(() => `The engine has not answered for ${((Date.now() - since) / 1000).toFixed(0)} s: ${snapshot.error}${pid}.`);
  }
  silence = null;
  if (paused) return drawSilence();
  if (shown && shown.epoch !== snapshot.epoch) { series = {}; $("plots").replaceChildren(); }
  shown = snapshot;
  shownAt = new Date().toLocaleTimeString();
  drawSilence();
  drawPlots();
  draw();
  say(`live, ${shownAt}`, false);
}

async function watch() { // EventSource can't send a key
  const answer = await fetch("status/snapshots", { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  if (answer.status === 401) {
    say("a key is needed", true);
    $("login").hidden = false;
    $("key").focus();
    return false;
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  $("login").hidden = true;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return true;
    const lines = (text + value).split("\n");
    text = lines.pop();
    if (lines.length) hear(JSON.parse(lines.at(-1)));
  }
}

async function keepWatching() {
  for (;;) {
    try {
      if (!await watch()) return;
      miss(() => "The server has ended the stream; trying again.");
    } catch (error) {
      miss(() => `There is no connection to the server (${error.message}); trying again.`);
    }
    await new Promise(resolve => setTimeout(resolve, 2000));
  }
}

function login() { key = $("key").value.trim(); $("key").value = ""; keepWatching(); }

function drawLegend() {
  $("legend").replaceChildren(...Object.entries(STATES).map(([state, text]) => {
    const item = element("li"), sample = element("canvas");
    sample.width = sample.height = 12;
    const brush = sample.getContext("2d");
    brush.fillStyle = color(state);
    brush.fillRect(0, 0, 12, 12);
    item.append(sample, text);
    return item;
  }));
}

$("enter").addEventListener("click", login);
$("key").addEventListener("keydown", event => { if (event.key === "Enter") login(); });
$("engine").addEventListener("change", () => { series = {}; shown = before = silence = null; $("plots").replaceChildren(); drawSilence(); });
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) say("paused", false);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawLegend(); draw(); });
addEventListener("resize", draw);
drawLegend();
setInterval(drawSilence, 1000);
keepWatching();
