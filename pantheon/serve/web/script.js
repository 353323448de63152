"use strict";
/* The status page: it asks the JSON views, one after the other, and draws what they say.  Text from the server and from
   models only ever becomes text nodes. */

const $ = (id) => document.getElementById(id);
const SAMPLES = 120; // of the plot, one a second
const FAST_MS = 1000, SLOW_EVERY = 3, REFUSED_MS = 30000, PATIENCE_MS = 8000, SLOWEST_MS = 15000;

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

// Replaces what a box shows only when it would look different, so that a selection or a screen reader keeps its place.
function show(box, ...nodes) {
  const same = nodes.length === box.childNodes.length && nodes.every((node, i) => node.isEqualNode(box.childNodes[i]));
  if (!same) box.replaceChildren(...nodes);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function size(bytes) {
  if (typeof bytes !== "number") return "?";
  let n = Math.abs(bytes), unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) { n /= 1024; unit += 1; }
  return `${bytes < 0 ? "-" : ""}${n >= 100 || unit === 0 ? n.toFixed(0) : n.toFixed(1)} ${UNITS[unit]}`;
}
const count = (n, word, plural) => `${n} ${n === 1 ? word : plural || word + "s"}`;
const seconds = (s) => (s < 10 ? `${s.toFixed(1)} s` : s < 120 ? `${s.toFixed(0)} s` : `${(s / 60).toFixed(0)} min`);
const tokens = (n) => (n ? `${n.toLocaleString("en")} tokens` : "");
const sum = (list, of) => list.reduce((total, item) => total + (of(item) || 0), 0);

// ---- asking -------------------------------------------------------------------------------------------------------

const key = (name) => sessionStorage.getItem(`pantheon.${name}`) || "";

function authorization(path) {
  const given = path.startsWith("/admin") ? key("admin-key") || key("api-key") : key("api-key");
  return given ? { Authorization: `Bearer ${given}` } : {};
}

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function get(path) {
  const answer = await fetch(path, { headers: authorization(path), signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  if (!answer.ok && path !== "/health") throw new Refused(answer.status, await reason(answer));
  return answer.headers.get("Content-Type").startsWith("application/json") ? answer.json() : answer.text();
}

async function reason(answer) {
  try {
    const { error } = await answer.json();
    return (error && error.message) || `status ${answer.status}`;
  } catch { return `status ${answer.status}`; }
}

const quietUntil = new Map(); // path -> when a view that was refused is asked again

// One view: asked, and drawn into its box.  Refusals are shown there and not repeated every second.
async function view(path, box, draw) {
  if ((quietUntil.get(path) || 0) > performance.now()) return undefined;
  try {
    const body = await get(path);
    draw(body);
    return body;
  } catch (fault) {
    if (!(fault instanceof Refused)) throw fault; // the server can not be reached
    quietUntil.set(path, performance.now() + REFUSED_MS);
    if (box) show(box, refusal(fault));
    return undefined;
  }
}

function refusal(fault) {
  const advice = { 401: "Type a key under “Keys”.", 403: "It may be open to this machine or with the admin key only." }[fault.status];
  return el("p", { class: "note" }, `Not shown: ${fault.message}. `, advice || "");
}

// ---- drawing ------------------------------------------------------------------------------------------------------

function bar(share, label, kind, reserve) {
  const percent = Math.round(100 * Math.max(0, Math.min(1, share || 0)));
  const used = el("span", { class: "used" });
  used.style.width = `${percent}%`;
  const held = reserve ? el("span", { class: "held", title: "reserve" }) : null;
  if (held) held.style.width = `${Math.round(100 * reserve)}%`;
  return el("div", { class: `bar ${kind || ""}`, role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100,
    "aria-valuenow": percent }, used, held);
}
const KINDS = { ready: "ok", loading: "watch", unloading: "tight", failed: "critical" };
const tag = (text, kind) => el("span", { class: `tag ${kind || ""}` }, text);
const place = (dies) => (dies && dies.length ? `die ${dies.join(", ")}` : "CPU");
const none = (text) => el("p", { class: "quiet" }, text);

function drawHealth(body) {
  const words = { ok: "answers", loading: "loading", no_model: "no model", stopping: "stopping" };
  const pill = $("health");
  pill.textContent = words[body.status] || String(body.status);
  if (body.degraded) pill.textContent += ` (without ${body.degraded.join(", ")})`;
  pill.className = `pill ${body.status === "ok" ? (body.degraded ? "tight" : "ok") : "watch"}`;
}

function drawModelList(body) {
  const select = $("model"), names = body.data.map((model) => model.id);
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
  }
  if (!seen.models) show($("models"), ...(names.length ? body.data.map((model) => el("div", { class: "item" },
    el("div", { class: "row" }, el("span", { class: "name" }, model.id), el("span", { class: "quiet" },
      tokens(model.context_length))))) : [none("No model answers.")]));
}

function drawModels(body) {
  seen.models = true;
  const items = [...grouped(body.models)].map(([name, parts]) => el("div", { class: "item" },
    el("div", { class: "row" }, el("span", { class: "name" }, name),
      el("span", { class: "quiet" }, parts.length > 1 ? count(parts.length, "replica") : "")),
    ...parts.map(instance)));
  const failed = Object.entries(body.failed || {}).map(([name, fault]) => el("div", { class: "item" },
    el("div", { class: "row" }, el("span", { class: "name" }, name), tag("failed", "critical")),
    el("p", { class: "quiet" }, String(fault.message || fault.code || ""))));
  show($("models"), ...(items.length + failed.length ? [...items, ...failed] : [none("No model is loaded.")]));
}

function grouped(models) {
  const map = new Map();
  for (const model of models) map.set(model.name, [...(map.get(model.name) || []), model]);
  return map;
}

function instance(model) {
  const memory = model.memory || {};
  const facts = [place(model.dies), model.architecture, tokens(model.n_ctx),
    memory.weights ? `weights ${size(memory.weights)}` : ""].filter(Boolean).join(" · ");
  return el("div", null,
    el("div", { class: "row" }, el("span", { class: "quiet" }, facts), tag(model.status, KINDS[model.status])),
    model.status === "loading" ? bar(model.progress, `${model.name} is loading`, "watch") : null,
    model.status === "loading" ? none(`${model.stage}, ${Math.round(100 * model.progress)} %`) : null);
}

function drawDies(body) {
  const items = body.dies.map((die) => {
    const share = die.budget_bytes ? die.used_bytes / die.budget_bytes : 0;
    return el("div", { class: "item" },
      el("div", { class: "row" }, el("span", { class: "name" }, `Die ${die.index}`), el("span", { class: "quiet" },
        die.name || die.kind), el("span", null, die.model || "free")),
      bar(share, `budget of die ${die.index}`, share > 0.95 ? "tight" : ""),
      none(`${size(die.used_bytes)} of ${size(die.budget_bytes)}${die.usable === false ? " · not usable" : ""}`));
  });
  const cpu = body.cpu.models.length ? `On the CPU: ${body.cpu.models.map((model) => model.name).join(", ")}` : "Nothing on the CPU";
  show($("dies"), ...(items.length ? items : [none("No dies; models run on the CPU.")]),
    el("p", { class: "quiet item" }, `${cpu} (${count(body.cpu.cores, "core")}).`));
}

function drawMemory(body) {
  const host = body.host, nodes = [];
  if (host) {
    const level = String(body.level), kind = level.toLowerCase(), total = host.total_bytes;
    nodes.push(el("div", { class: "row" }, el("span", { class: "name" }, "Pressure"), tag(level, kind)),
      bar(total ? 1 - host.available_bytes / total : 0, "memory in use", kind, total ? host.reserve_bytes / total : 0),
      none(`${size(host.available_bytes)} of ${size(total)} free (${host.bound_by}), ${size(host.reserve_bytes)} kept in reserve`),
      none(why(body)));
    for (const die of body.dies || []) {
      if (die.level !== "OK") nodes.push(el("div", { class: "row" }, el("span", null, `Die ${die.index}`), tag(die.level, String(die.level).toLowerCase())));
    }
  }
  if (body.admission !== "on") nodes.push(none(body.admission === "stale" ? "The watcher has stopped: nothing new is admitted by its numbers." : "Memory is not watched."));
  for (const row of body.ladder || []) {
    const rungs = row.rungs || [];
    nodes.push(el("div", { class: "item" },
      el("div", { class: "row" }, el("span", { class: "name" }, row.name), el("span", { class: "quiet" }, place(row.dies)),
        tag(rungs.length ? `${row.level}, ${count(rungs.length, "rung")}` : row.enabled === false ? "ladder off" : "nothing given up",
          rungs.length ? String(row.level).toLowerCase() : "ok")),
      rungs.length ? el("ul", { class: "rungs" }, ...rungs.map((rung, i) => el("li", null, `rung ${rung}: ${(row.notes || [])[i] || ""}`))) : null,
      row.kv_used_bytes ? none(`${size(row.kv_used_bytes)} of warm conversations (${row.kv_type})`) : null));
  }
  show($("memory"), ...nodes);
}

// What the level comes from: bytes or stalls.
function why(body) {
  const host = body.host, psi = host.psi_some_avg10 || 0;
  if (body.level === "OK") return `No pressure; ${psi.toFixed(1)} % of the last 10 s were spent waiting for memory.`;
  const reasons = [];
  if (host.level_bytes !== "OK") reasons.push(`${host.level_bytes}: ${size(host.slack_bytes)} above the reserve`);
  if (host.level_psi !== "OK") reasons.push(`${host.level_psi}: ${psi.toFixed(1)} % of the last 10 s were spent waiting for memory`);
  for (const die of body.dies || []) if (die.level !== "OK") reasons.push(`${die.level}: die ${die.index}`);
  return reasons.join("; ") || `${body.level}, falling`;
}

function drawWork(body) {
  const items = body.entries.map((entry) => {
    const sched = entry.scheduler, queue = sched ? sched.queue : { waiting: entry.waiting, depth: null };
    const slots = sched ? inUse(sched.slots, entry.capacity) : [single(entry)];
    return el("div", { class: "item" },
      el("div", { class: "row" }, el("span", { class: "name" }, entry.name), el("span", { class: "quiet" }, place(entry.dies)),
        el("span", { class: "quiet" }, sched ? `${entry.active ?? 0} of ${entry.capacity} users` : "one at a time")),
      el("ul", { class: "slots" }, ...slots.map(slotNode)),
      none([queue.depth === null ? `${queue.waiting} waiting` : `queue ${queue.waiting} of ${queue.depth}`,
        entry.wait_s ? `about ${seconds(entry.wait_s)} to wait` : "", entry.service_s ? `an answer takes ${seconds(entry.service_s)}` : "",
        entry.cached_tokens ? `${tokens(entry.cached_tokens)} warm` : "", sched && sched.level !== "OK" ? `level ${sched.level}` : ""].filter(Boolean).join(" · ")));
  });
  show($("work"), ...(items.length ? items : [none("Nobody works: no model is loaded.")]));
}

// A replica has more slots than users, for conversations that rest: as many are shown as may still be used.
function inUse(slots, users) {
  let idle = users - slots.filter((slot) => slot.state !== "idle").length;
  return slots.filter((slot) => slot.state !== "idle" || idle-- > 0);
}

function single(entry) {
  const run = (entry.requests || []).find((request) => request.phase === "prefill" || request.phase === "decode");
  return { id: 0, state: run ? run.phase : entry.busy ? "busy" : "idle", ...run };
}

function slotNode(slot) {
  const works = slot.state !== "idle";
  let text = String(slot.state);
  if (slot.state === "prefill" && slot.prompt_tokens) text = `reads ${slot.read_tokens}/${slot.prompt_tokens}`;
  else if (works && slot.made_tokens !== undefined) text = `${slot.state}, ${count(slot.made_tokens, "token")}`;
  return el("li", { class: works ? "slot works" : "slot" }, `#${slot.id} ${text}`);
}

// /slots is what an API key may see where the admin views are refused.
function drawSlots(rows) {
  const byModel = grouped(rows.map((row) => ({ ...row, name: `${row.model}` })));
  show($("work"), ...[...byModel].map(([name, slots]) => el("div", { class: "item" }, el("div", { class: "row" },
    el("span", { class: "name" }, name)), el("ul", { class: "slots" }, ...slots.map((slot) => slotNode({
      id: slot.id, state: slot.state, made_tokens: ((slot.next_token || [])[0] || {}).n_decoded }))))));
}

// ---- the plot -----------------------------------------------------------------------------------------------------

const rates = [];
let last = null; // {total, at}
const seen = {};

function sample(total, more) {
  const at = performance.now();
  if (last && at > last.at) {
    rates.push(Math.max(0, (1000 * (total - last.total)) / (at - last.at)));
    if (rates.length > SAMPLES) rates.shift();
  }
  last = { total, at };
  drawPlot(more);
}

function drawPlot(more) {
  const recent = rates.slice(-3), now = recent.length ? sum(recent, (rate) => rate) / recent.length : 0;
  const peak = Math.max(1, ...rates), x = (i) => SAMPLES - rates.length + i + 1;
  const points = rates.map((rate, i) => `${x(i)} ${(39 - (37 * rate) / peak).toFixed(2)}`);
  $("rate").textContent = now < 10 ? now.toFixed(1) : now.toFixed(0);
  $("rate-more").textContent = more;
  $("peak").textContent = rates.length ? `highest ${Math.max(...rates).toFixed(0)}` : "";
  $("line").setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
  $("area").setAttribute("d", points.length > 1 ? `M${x(0)} 40L${points.join("L")}L${SAMPLES} 40Z` : "");
}

function metric(text, name) {
  let total = 0;
  for (const line of text.split("\n")) {
    if (line.startsWith(name) && /^[ {]/.test(line.slice(name.length))) total += Number(line.slice(line.lastIndexOf(" ") + 1)) || 0;
  }
  return total;
}

// ---- the loop -----------------------------------------------------------------------------------------------------

let round = 0, wait = FAST_MS, timer = null, asking = false;

async function look() {
  const slow = round % SLOW_EVERY === 0;
  if (slow) {
    drawHealth(await get("/health"));
    await view("/v1/models", $("models"), drawModelList);
    await view("/admin/models", null, drawModels);
    await view("/admin/dies", $("dies"), drawDies);
    await view("/admin/memory", $("memory"), drawMemory);
  }
  const sched = await view("/admin/sched", $("work"), drawWork);
  if (sched) {
    const busy = sum(sched.entries, (entry) => entry.active ?? Number(entry.busy)), waiting = sum(sched.entries, (entry) => entry.waiting);
    if (sched.entries.every((entry) => entry.totals)) return sample(sum(sched.entries, (entry) => entry.totals.completion_tokens), load(busy, waiting));
  } else await view("/slots", null, drawSlots);
  await view("/metrics", null, (text) => sample(metric(text, "pantheon_completion_tokens_total"), load(metric(text, "pantheon_requests_in_flight"), 0)));
  return undefined;
}
const load = (busy, waiting) => `${count(busy, "answer")} in the making${waiting ? `, ${waiting} waiting` : ""}`;

async function tick() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    await look();
    wait = FAST_MS;
  } catch (fault) {
    wait = Math.min(SLOWEST_MS, wait * 2);
    $("health").textContent = fault instanceof Refused ? fault.message : "can not be reached";
    $("health").className = "pill critical";
  }
  round += 1;
  asking = false;
  clearTimeout(timer);
  timer = setTimeout(tick, wait);
}

function again() {
  quietUntil.clear();
  round = 0;
  clearTimeout(timer);
  timer = setTimeout(tick, 0);
}
document.addEventListener("visibilitychange", () => { last = null; if (!document.hidden) again(); });

// ---- keys ---------------------------------------------------------------------------------------------------------

$("open-keys").addEventListener("click", () => {
  for (const name of ["api-key", "admin-key"]) $(name).value = key(name);
  $("keys").showModal();
});
$("forget").addEventListener("click", () => $("keys").close("forget")); // no submit button: Enter would press it
$("keys").addEventListener("close", () => {
  const action = $("keys").returnValue;
  for (const name of ["api-key", "admin-key"]) {
    if (action === "keep") sessionStorage.setItem(`pantheon.${name}`, $(name).value.trim());
    if (action === "forget") sessionStorage.removeItem(`pantheon.${name}`);
    $(name).value = "";
  }
  $("keys").returnValue = "";
  if (action) again();
});

// ---- the chat -----------------------------------------------------------------------------------------------------

let messages = [], running = null;

function turn(role) {
  const node = el("div", { class: `turn ${role}` });
  $("talk").append(node);
  return node;
}

function atEnd(change) {
  const talk = $("talk"), follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  change();
  if (follows) talk.scrollTop = talk.scrollHeight;
}

// What an answer looks like while it comes: thoughts apart, text, and one line about it.
class Reply {
  constructor() {
    this.node = turn("assistant");
    this.thoughts = el("div", { class: "text" });
    this.summary = el("summary", null, "Thinking …");
    this.thinking = el("details", { class: "thought", open: "" }, this.summary, this.thoughts);
    this.body = el("div", { class: "text" });
    this.state = el("p", { class: "quiet" }, "…");
    this.node.append(this.body, this.state);
    this.content = "";
  }
  think(text) {
    if (!this.thinking.parentNode) this.node.prepend(this.thinking);
    this.thoughts.append(text);
  }
  say(text) {
    if (!this.content && this.thinking.parentNode) {
      this.thinking.removeAttribute("open");
      this.summary.textContent = "Thoughts";
    }
    this.content += text;
    this.body.append(text);
  }
  call(part) {
    const name = (part.function || {}).name;
    if (name) this.say(`${name}(`);
    this.say((part.function || {}).arguments || "");
  }
  end(text, fault) {
    this.summary.textContent = "Thoughts";
    this.state.textContent = text;
    if (fault) { this.state.className = "fault"; this.state.setAttribute("role", "alert"); }
  }
}

async function ask(text) {
  const talk = messages; // another one by the time of the answer, after “New chat”
  talk.push({ role: "user", content: text });
  const mine = turn("user");
  mine.append(el("div", { class: "text" }, text));
  const reply = new Reply(), began = performance.now();
  $("talk").scrollTop = $("talk").scrollHeight;
  busy(new AbortController());
  try {
    await stream(reply, talk, began);
  } catch (fault) {
    if (fault.name === "AbortError") reply.end("stopped");
    else reply.end(fault instanceof TypeError ? "The server can not be reached." : fault.message, true);
  }
  if (reply.content) talk.push({ role: "assistant", content: reply.content });
  else talk.pop(); // what was not answered may be asked again
  busy(null);
}

async function stream(reply, talk, began) {
  const body = { model: $("model").value || undefined, messages: talk, stream: true, stream_options: { include_usage: true },
    return_progress: true, temperature: $("temperature").valueAsNumber, max_tokens: $("most").valueAsNumber };
  for (const name of ["temperature", "max_tokens"]) if (Number.isNaN(body[name])) delete body[name];
  const path = "/v1/chat/completions";
  const answer = await fetch(path, { method: "POST", signal: running.signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...authorization(path) } });
  if (!answer.ok) throw new Refused(answer.status, await reason(answer));
  const about = { finish: null, usage: null, timings: null };
  for await (const line of lines(answer.body)) {
    if (line.startsWith(":")) waitLine(reply, line);
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message || "the answer was cut off");
    atEnd(() => take(reply, chunk, about));
  }
  reply.end(summary(about, performance.now() - began));
}

function take(reply, chunk, about) {
  const choice = (chunk.choices || [])[0], progress = chunk.prompt_progress;
  if (progress && progress.total) reply.state.textContent = `reads the prompt, ${Math.round((100 * progress.processed) / progress.total)} %`;
  about.usage = chunk.usage || about.usage;
  about.timings = chunk.timings || about.timings;
  if (!choice) return;
  const delta = choice.delta || {};
  if (delta.reasoning_content) reply.think(delta.reasoning_content);
  if (delta.content) reply.say(delta.content);
  for (const part of delta.tool_calls || []) reply.call(part);
  about.finish = choice.finish_reason || about.finish;
  if (delta.content || delta.reasoning_content) reply.state.textContent = "";
}

function waitLine(reply, line) {
  const match = /queued pos=(\d+)(?: eta=([\d.]+))?/.exec(line);
  if (match) reply.state.textContent = `waits in the queue, place ${match[1]}${match[2] ? `, about ${seconds(Number(match[2]))}` : ""}`;
}

function summary(about, ms) {
  const parts = [];
  if (about.usage) parts.push(count(about.usage.completion_tokens, "token"));
  if (about.timings && about.timings.predicted_per_second) parts.push(`${about.timings.predicted_per_second.toFixed(1)} per second`);
  parts.push(seconds(ms / 1000));
  if (about.finish === "length") parts.push("ended at the limit of tokens");
  return parts.join(" · ");
}

async function* lines(body) {
  const decoder = new TextDecoder(), reader = body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const whole = rest.split("\n");
    rest = whole.pop();
    yield* whole;
    if (done) return;
  }
}

function busy(controller) {
  running = controller;
  $("send").disabled = Boolean(controller);
  $("stop").disabled = !controller;
  $("talk").setAttribute("aria-busy", String(Boolean(controller)));
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  ask(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  $("talk").replaceChildren();
  $("prompt").focus();
});

tick();
