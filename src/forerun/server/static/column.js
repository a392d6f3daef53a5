// One of the two columns: a text that grows, and its figures. What came is drawn once a frame: to lay the text out for
// every token would hold up the whole page once a fast server has sent more than it can draw.

const SHOWN_STEPS = 240;
const HIGHEST = 12; // tokens of a step from which its bar grows no more
const UNTOLD = "untold"; // where tenants share drafts, the server does not say whose they are

export class Column {
  constructor(element) {
    this.element = element;
    this.text = element.querySelector(".answer");
    this.steps = element.querySelector(".steps");
    this.figures = Object.fromEntries(
      [...element.querySelectorAll("[data-figure]")].map((each) => [each.dataset.figure, each]),
    );
    this.empty = this.figures.summary.textContent;
    this.waiting = this.text.dataset.empty;
    this.clear();
  }

  clear() {
    this.ids = [];
    this.said = ""; // without reasoning and marks, which a chat's tokens show
    this.counts = {};
    this.undrawn = []; // [text, source], and the steps as lists of sources, since the last frame
    this.undrawnSteps = [];
    this.prompt = null;
    this.drafted = this.accepted = this.passes = this.first = 0;
    this.reading = this.seconds = 0;
    this.finish = null;
    this.scheduled = 0;
    this.text.replaceChildren();
    this.text.dataset.empty = this.waiting;
    this.steps.replaceChildren();
    this.figures.summary.textContent = this.empty;
    for (const name of ["speed", "stride", "acceptance"]) this.figures[name].textContent = "–";
  }

  /** Tokens a second after the first step, by the server's clock; 0 as long as there are none. */
  get speed() {
    return this.seconds ? (this.ids.length - this.first) / this.seconds : 0;
  }

  busy(state) {
    this.element.classList.toggle("busy", state);
    this.text.setAttribute("aria-busy", String(state));
    if (!state) this.show();
  }

  /** Take in a chunk of the stream: a step with its tokens, the end of the text, or what was used. */
  take(chunk) {
    if (chunk.usage) this.prompt = chunk.usage.prompt_tokens;
    const choice = chunk.choices[0];
    const text = choice?.text ?? choice?.delta?.content ?? "";
    this.said += text;
    if (choice?.finish_reason) {
      this.finish = choice.finish_reason;
      this.text.dataset.empty = "The model ended its text at once.";
    }
    if (chunk.forerun) this.step(chunk.forerun);
    else this.undrawn.push([text, "target"]); // the rest of a text, at its end
    this.scheduled ||= requestAnimationFrame(() => this.show());
  }

  step({ tokens, drafted, accepted, seconds }) {
    this.passes += 1;
    this.drafted += drafted;
    this.accepted += accepted;
    if (this.passes === 1) [this.reading, this.first] = [seconds, tokens.length];
    else this.seconds += seconds;
    this.undrawnSteps.push(tokens.slice(0, HIGHEST).map(({ source }) => source ?? UNTOLD));
    for (const { id, text, source: told } of tokens) {
      const source = told ?? UNTOLD;
      this.ids.push(id);
      this.counts[source] = (this.counts[source] ?? 0) + 1;
      this.undrawn.push([text, source]);
    }
  }

  /** Draw what came since the last frame. What one source gave in a row is one element. */
  draw() {
    for (const sources of this.undrawnSteps.splice(0).slice(-SHOWN_STEPS)) {
      const bar = this.steps.appendChild(document.createElement("span"));
      for (const source of sources) bar.prepend(part(source));
    }
    while (this.steps.childElementCount > SHOWN_STEPS) this.steps.firstChild.remove();
    const follows = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    for (const [text, source] of this.undrawn.splice(0)) this.write(text, source);
    if (follows) this.text.scrollTop = this.text.scrollHeight;
  }

  write(text, source) {
    if (!text) return;
    const last = this.text.lastChild;
    if (last?.dataset.source === source) {
      last.firstChild.appendData(text);
      return;
    }
    const piece = this.text.appendChild(document.createElement("span"));
    piece.dataset.source = source;
    piece.className = source;
    piece.append(text);
  }

  /** Draw, and write down the figures. */
  show() {
    this.scheduled = 0;
    this.draw();
    if (!this.passes) return;
    this.element.dispatchEvent(new Event("figures"));
    const { speed, stride, acceptance, summary } = this.figures;
    speed.textContent = this.speed ? this.speed.toFixed(this.speed < 10 ? 1 : 0) : "–";
    stride.textContent = (this.ids.length / this.passes).toFixed(2);
    acceptance.textContent = this.drafted ? `${Math.round((100 * this.accepted) / this.drafted)} %` : "–";
    const prompt = this.prompt === null ? "prompt" : `prompt of ${count(this.prompt, "token")}`;
    summary.textContent =
      `${count(this.ids.length, "token")} in ${count(this.passes, "step")} · ${prompt} read in ` +
      `${inSeconds(this.reading)} · decoded in ${inSeconds(this.seconds)}`;
  }
}

function part(source) {
  const piece = document.createElement("i");
  piece.className = source;
  return piece;
}

export const count = (number, noun, many = `${noun}s`) => `${number} ${number === 1 ? noun : many}`;

const inSeconds = (seconds) => `${seconds.toFixed(seconds < 1 ? 3 : 2)} s`;
