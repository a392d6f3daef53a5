// The page: what is asked, what runs, and what came of it.

import { Column, count } from "./column.js";
import { chunks, examples, servedModel } from "./stream.js";

const $ = (id) => document.getElementById(id);
const plain = new Column($("plain"));
const fast = new Column($("fast"));

let served = null; // the model, as the server describes it
let running = null; // what stops the run
let turns = []; // of the conversation

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
  $("chat").disabled = !chat;
  $("chat").parentElement.title = chat ? "" : "This model has no chat template.";
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
  $("example-field").hidden = chatting();
  showTurns();
}

function showTurns() {
  $("turns").hidden = $("fresh").hidden = !chatting() || !turns.length;
  $("turns").replaceChildren(
    ...turns.map(({ role, content }) => {
      const turn = document.createElement("li");
      const who = turn.appendChild(document.createElement("b"));
      who.textContent = role === "user" ? "You" : "Model";
      turn.append(content);
      return turn;
    }),
  );
  $("turns").scrollTop = $("turns").scrollHeight;
}

/** Fill a column. The two have namespaces of their own, so that neither reads a prompt that the other has read. */
async function fill(column, name, drafter, asked, signal) {
  say(`${name}: reading the prompt.`);
  column.busy(true);
  const [address, about] = asked;
  const forerun = { trace: true, drafter, namespace: drafter === "none" ? "page-plain" : "page" };
  if (drafter !== "none") forerun.budget = number("budget");
  const body = { ...about, stream: true, stream_options: { include_usage: true }, forerun };
  try {
    for await (const chunk of chunks(address, body, $("key").value, signal)) {
      if (!column.passes) say(`${name}: decoding.`);
      column.take(chunk);
    }
  } finally {
    column.busy(false);
  }
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

async function start() {
  if (running) return;
  const { signal } = (running = new AbortController());
  showRunning();
  complain(null);
  try {
    if (!served) await greet(true);
    signal.throwIfAborted();
    if (served) await compare(signal);
  } catch (error) {
    running.abort(); // the other one, too
    say("Stopped.");
    if (error.name !== "AbortError") complain(error);
  } finally {
    running = null;
    showRunning();
  }
}

/** Fill both columns, and conclude. What is changed in the form meanwhile is for the next run. */
async function compare(signal) {
  for (const column of [plain, fast]) column.clear();
  judge("", "Are both texts equal?", "–", "Time of decoding, without the first step, which reads the prompt.");
  for (const show of [mark, race]) show();
  const asked = question();
  const before = turns;
  const drafter = $("drafter").value;
  const together = $("order").value === "together";
  $("race").hidden = together;
  const first = fill(plain, "Plain", "none", asked, signal);
  if (!together) await first;
  await Promise.all([first, fill(fast, "Accelerated", drafter, asked, signal)]);
  conclude(together);
  const { messages } = asked[1];
  if (messages && turns === before) keepTurn(messages);
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
  const times = ratio ? `${ratio.toFixed(2)} times as fast` : "";
  const limits = equal || served.forerun.exactness === "bitwise" ? "" : " This server's texts are equal within rounding.";
  const shared = together ? " They shared passes; compare tokens per step." : " Decoding only, without the first step, which reads the prompt.";
  const whole = [plain, fast].some(({ speed }) => !speed) ? " All of a text came in that step, so there is no speed." : "";
  const passes = `${plain.passes} passes of the model against ${fast.passes}.`;
  judge(equal ? "equal" : "different", title, times || "–", `${passes}${shared}${together ? "" : whole}${limits}`);
  say(times ? `${title} ${times}.` : title, true);
}

function judge(kind, title, times, note) {
  $("verdict").className = `verdict ${kind}`;
  $("verdict-title").textContent = title;
  $("verdict-times").textContent = times;
  $("verdict-note").textContent = note;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
$("stop").addEventListener("click", stop);
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
