// The page: what is asked, what runs, and what came of it.

import { Column, count } from "./column.js";
import { chunks, examples, servedModel } from "./stream.js";
import { outcome } from "./verdict.js";

const $ = (id) => document.getElementById(id);
const plain = new Column($("plain"));
const fast = new Column($("fast"));

let served = null; // the model, as the server describes it
let running = null; // what stops the run
let turns = []; // of the conversation
let asked = null; // address and body of the last run

const chatting = () => $("chat").checked;
const number = (id) => Number($(id).value);

/** Tell how things stand; what the page shows anyhow is for screen readers alone. */
function say(text, shown = false) {
  $("status").textContent = text;
  $("status").classList.toggle("unseen", shown);
}

function complain(error) {
  $("error").textContent = error?.message ?? "";
  $("error").hidden = !error;
  if (error?.status === 401) {
    $("key-field").hidden = false;
    $("key").focus();
  }
}

/** Ask what is served, and offer it. A key that is missing is asked for; it is a mistake only once something runs. */
async function greet(starting = false) {
  try {
    served = await servedModel($("key").value);
  } catch (error) {
    served = null;
    if (error.status === 401 && !$("key").value && !starting) $("key-field").hidden = false;
    else complain(error);
    return;
  }
  complain(null);
  const { drafters, budget, max_tokens: most, chat } = served.forerun;
  $("served").textContent = served.id;
  $("drafter").replaceChildren(...drafters.map((name) => new Option(name)));
  $("budget").max = $("budget").value = budget;
  $("length").max = most;
  $("length").value = Math.min(number("length"), most);
  if (!starting && chat === $("chat").disabled) $(chat ? "chat" : "continue").checked = true; // first of all
  $("chat").disabled = !chat;
  $("chat").parentElement.title = chat ? "" : "This model has no chat template.";
  changeKind();
}

async function offerExamples() {
  const prompts = await examples().catch(() => []);
  $("example").append(...prompts.map((each, index) => new Option(each.title, index)));
  $("example").addEventListener("change", () => {
    const chosen = prompts[$("example").value];
    if (!chosen) return;
    $("prompt").value = chosen.prompt;
    $("length").value = Math.min(chosen.max_new_tokens, Number($("length").max));
  });
}

function changeKind() {
  $("prompt-label").textContent = chatting() ? "Message" : "Text to continue";
  showTurns();
}

function showTurns() {
  $("conversation").hidden = $("fresh").hidden = !chatting() || !turns.length;
  $("turns-count").textContent = `The conversation so far: ${count(turns.length, "message")}`;
  $("turns").replaceChildren(
    ...turns.map(({ role, content }) => {
      const turn = document.createElement("li");
      const who = turn.appendChild(document.createElement("b"));
      who.textContent = role === "user" ? "You" : "Model";
      turn.append(content);
      return turn;
    }),
  );
}

/** Fill a column. The two have namespaces of their own, so that neither reads a prompt that the other has read. */
async function fill(column, name, forerun, began, signal) {
  say(`${name}: reading the prompt.`);
  column.busy(true);
  const [address, about] = asked;
  const body = { ...about, stream: true, stream_options: { include_usage: true }, forerun: { trace: true, ...forerun } };
  try {
    for await (const chunk of chunks(address, body, $("key").value, signal)) {
      began();
      if (!column.passes) say(`${name}: decoding.`);
      column.take(chunk);
    }
  } finally {
    column.busy(false);
  }
}

/** How the accelerated text is drafted. A namespace that nobody has used holds no earlier texts. */
function drafting() {
  const namespace = $("earlier").checked ? "page" : `page-${Math.random().toString(36).slice(2)}`;
  const drafter = $("drafter").value;
  return drafter === "none" ? { drafter, namespace } : { drafter, namespace, budget: number("budget") };
}

function question() {
  const about = {
    model: served.id,
    max_tokens: number("length"),
    temperature: number("temperature"),
    seed: number("seed"),
  };
  if (!chatting()) return ["/v1/completions", { ...about, prompt: $("prompt").value }];
  return ["/v1/chat/completions", { ...about, messages: [...turns, { role: "user", content: $("prompt").value }] }];
}

/** Run what is asked, or the last run `again`. */
async function start(again = false) {
  if (running) return;
  const { signal } = (running = new AbortController());
  showRunning();
  complain(null);
  try {
    if (!served) await greet(true);
    signal.throwIfAborted();
    if (served) await compare(again && asked ? asked : question(), signal);
  } catch (error) {
    running.abort(); // the other one, too
    say("Stopped.");
    if (error.name !== "AbortError") complain(error);
  } finally {
    running = null;
    showRunning();
    showStale(false);
  }
}

/** Fill both columns, and conclude. What is changed in the form meanwhile is for the next run. */
async function compare(question, signal) {
  const before = turns;
  const together = $("order").value === "together";
  const plainly = { drafter: "none", namespace: "page-plain" };
  const drafted = drafting();
  asked = question;
  let begun = false;
  const began = () => {
    if (!begun) clear(together);
    begun = true;
  };
  showStale(true);
  const first = fill(plain, "Plain", plainly, began, signal);
  if (!together) await first;
  await Promise.all([first, fill(fast, "Accelerated", drafted, began, signal)]);
  conclude(together);
  const { messages } = question[1];
  if (messages && turns === before) keepTurn(messages);
  showVerdict();
}

/** The last result stands until the new one begins: an error before leaves it as it was. */
function clear(together) {
  showStale(false);
  for (const column of [plain, fast]) column.clear();
  judge("", "The model writes the text twice.", "", "Time of decoding, without the first step, which reads the prompt.");
  for (const show of [mark, race]) show();
  $("race").hidden = together;
  showVerdict();
}

function showStale(stale) {
  for (const { element } of [plain, fast]) element.classList.toggle("stale", stale);
}

/** Where the texts stand one below the other, what came of them is out of sight. */
function showVerdict() {
  const behavior = matchMedia("(prefers-reduced-motion: reduce)").matches ? "instant" : "smooth";
  if (matchMedia("(max-width: 52rem)").matches) $("verdict").scrollIntoView({ behavior });
}

function stop() {
  running?.abort();
}

function keepTurn(messages) {
  turns = [...messages, { role: "assistant", content: fast.said }];
  if ($("prompt").value === messages.at(-1).content) $("prompt").value = "";
  showTurns();
}

function showRunning() {
  $("start").setAttribute("aria-disabled", String(Boolean(running)));
  $("stop").setAttribute("aria-disabled", String(!running));
}

/** How many tokens each source has given, in the legend. */
function mark() {
  for (const item of $("legend").children) {
    const tokens = fast.counts[item.dataset.source] ?? 0;
    item.querySelector("b").textContent = tokens ? count(tokens, "token") : "";
    if (tokens) item.hidden = false;
  }
}

/** What a token takes so far, as bars of the same scale; each leaves room for its figure. */
function race() {
  const slowest = Math.min(...[plain, fast].map(({ speed }) => speed || Infinity));
  for (const [name, { speed }] of [["plain", plain], ["fast", fast]]) {
    $(`lane-${name}`).style.width = `calc((100% - 9rem) * ${speed ? slowest / speed : 0})`;
    $(`time-${name}`).textContent = speed ? `${(1000 / speed).toPrecision(3)} ms a token` : "–";
  }
}

/** Compare both texts, token for token, and say what it took. */
function conclude(together) {
  const different = plain.ids.findIndex((id, place) => id !== fast.ids[place]);
  const equal = different < 0 && plain.ids.length === fast.ids.length && plain.finish === fast.finish;
  const place = different < 0 ? plain.ids.length : different;
  const title = equal ? "Both texts are equal, token for token." : `The texts differ from token ${place + 1} on.`;
  const ratio = !together && plain.speed && fast.speed ? fast.speed / plain.speed : 0;
  const { kind, times, disturbed } = outcome(equal, ratio, plain.passes / fast.passes);
  const limits = equal || served.forerun.exactness === "bitwise" ? "" : " This server's texts are equal within rounding.";
  const shared = together ? " They shared passes; compare tokens per step." : " Decoding only, without the first step, which reads the prompt.";
  const doubt = disturbed ? " So few saved passes do not explain the times: run it again." : "";
  const whole = [plain, fast].some(({ speed }) => !speed) ? " All of a text came in that step, so there is no speed." : "";
  const passes = `${count(plain.passes, "pass", "passes")} of the model against ${fast.passes}.`;
  $("race").hidden = !ratio;
  judge(kind, title, times, `${passes}${shared}${together ? "" : whole}${doubt}${limits}`, fast.counts.earlier);
  say([title, times && `${times}.`, $("earlier-count").textContent].filter(Boolean).join(" "), true);
}

function judge(kind, title, times, note, earlier = 0) {
  $("verdict").className = `verdict ${kind}`;
  $("verdict-earlier").hidden = !earlier;
  $("earlier-count").textContent = earlier
    ? `${earlier} of its ${count(fast.ids.length, "token")} came from answers of earlier runs.`
    : "";
  $("verdict-title").textContent = title;
  $("verdict-times").textContent = times;
  $("verdict-note").textContent = note;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
$("stop").addEventListener("click", stop);
$("without").addEventListener("click", () => {
  $("earlier").checked = false;
  start(true);
});
$("more").addEventListener("invalid", () => ($("more").open = true), true); // what is folded away cannot be pointed at
$("fast").addEventListener("figures", mark);
for (const column of [plain, fast]) column.element.addEventListener("figures", race);
$("key").addEventListener("change", () => greet());
$("fresh").addEventListener("click", () => {
  turns = [];
  showTurns();
  $("prompt").focus();
});
for (const kind of document.getElementsByName("kind")) kind.addEventListener("change", changeKind);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) {
    event.preventDefault();
    stop();
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
greet();
offerExamples();
