// Asks the server, and hands on what it streams.

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** What the server answers, or why it does not, in its own words. */
async function answer(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refused("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(body?.error?.message ?? `The server answered ${response.status}.`, response.status);
}

/** The model that is served. */
export async function servedModel(key) {
  const body = await (await answer("/v1/models", { headers: headers(key) })).json();
  return body.data[0];
}

/** The prompts to try. */
export async function examples() {
  return (await answer("/page/prompts.json", {})).json();
}

/** The chunks of a streamed answer, until its end. Aborting the signal closes the connection, which ends the request. */
export async function* chunks(address, body, key, signal) {
  const told = { method: "POST", headers: { "Content-Type": "application/json", ...headers(key) } };
  const response = await answer(address, { ...told, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Refused("The connection broke off.", 0);
    });
    if (done) throw new Refused("The connection ended before the text did.", 0);
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment, while the server is silent
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.message, 500);
      yield chunk;
    }
  }
}
