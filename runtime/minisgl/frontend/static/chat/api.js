// Requests of the chat page to the server that it came from.

// An answer of the server that is an error. `code` is stable; `requestId` finds the request in the server's log.
export class ApiError extends Error {
  constructor(status, { message, code = "", param = null }, requestId = "") {
    super(message);
    Object.assign(this, { status, code, param, requestId });
  }
}

export class Unreachable extends Error {}

export class BrokenStream extends Error {
  constructor() {
    super("The connection broke before the answer was complete.");
  }
}

const headers = key => ({ "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) });

// Returns the response to a request. Throws ApiError, Unreachable, and AbortError.
async function request(path, key, options = {}) {
  let response;
  try {
    response = await fetch(path, { headers: headers(key), ...options });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Unreachable(error.message);
  }
  if (response.ok) return response;
  let error = { message: `HTTP ${response.status}` };
  try {
    error = (await response.json()).error ?? error;
  } catch {
    // A proxy's page of HTML: the status is all that is known.
  }
  throw new ApiError(response.status, error, response.headers.get("x-request-id") ?? "");
}

// Returns the served models, as objects of OpenAI's API with `capabilities`.
export async function fetchModels(key) {
  const response = await request("v1/models", key);
  return (await response.json()).data;
}

// Sends a chat and calls take(chunk) for each event of the answer, which is whole only when it ends with [DONE].
export async function streamChat(body, { key, signal, take }) {
  const response = await request("v1/chat/completions", key, { method: "POST", signal, body: JSON.stringify(body) });
  const requestId = response.headers.get("x-request-id") ?? "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await read(reader);
    if (done) throw new BrokenStream();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new ApiError(200, chunk.error, requestId);
      take(chunk);
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new BrokenStream();
  }
}
