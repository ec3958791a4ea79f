// What went wrong, and what a person at the page can do about it.

import { ApiError, BrokenStream, Unreachable } from "./api.js";

const WAIT = "Wait a few seconds, then retry.";
const OPERATOR = "Only the people who run this server can change that.";

const BY_CODE = {
  __proto__: null,
  missing_api_key: ["This server needs an API key.", "Enter it in the settings.", "settings"],
  invalid_api_key: ["The server does not know this API key.", "Correct it in the settings.", "settings"],
  model_not_found: ["This model is no longer served here.", "Choose another one at the top of the page, or reload it."],
  context_length_exceeded: [
    "This chat is longer than the model can read.",
    "Start a new chat, or edit an earlier question: what follows it is dropped.",
  ],
  no_chat_template: [
    "This model has no chat template, so it cannot chat.",
    "It continues texts: use POST /v1/completions.",
  ],
  queue_full: ["Too many requests wait at this server.", WAIT],
  not_serving: ["This model is suspended.", OPERATOR],
  draining: ["This server is about to stop.", WAIT],
  shutting_down: ["This server is about to stop.", WAIT],
  engine_unavailable: ["No model can answer at the moment.", "It may still be starting. Retry in a minute."],
  not_ready: ["No model can answer at the moment.", "It may still be starting. Retry in a minute."],
};

// Returns { what, advice, detail, action }: action "settings" offers to open them; `detail` are the server's own words.
export function explain(error) {
  if (error instanceof ApiError) return explainAnswer(error);
  if (error instanceof BrokenStream) return problem(error.message, "Retry. The server may have been restarted.");
  if (error instanceof Unreachable) {
    const advice = "Check that it still runs and that this device is online, then retry.";
    return problem("The server cannot be reached.", advice);
  }
  return problem(error.message, error.advice ?? "Retry.");
}

function explainAnswer(error) {
  const [what, advice, action] = BY_CODE[error.code] ?? byStatus(error);
  return problem(what, advice, { detail: error.message, action });
}

// Returns [what, advice, action] for codes that are not in the table.
function byStatus({ status, param, requestId }) {
  switch (status) {
    case 401:
    case 403:
      return ["The server refuses this page.", OPERATOR];
    case 429:
      return ["The server takes no more requests of yours at the moment.", WAIT];
    case 502:
    case 503:
    case 504:
      return ["No model can answer at the moment.", WAIT];
  }
  if (status === 400 && param) {
    return [`The server refuses “${param}”.`, "Change it in the settings, then retry.", "settings"];
  }
  if (status >= 400 && status < 500) {
    return ["The server refuses this request.", "Edit the question, or start a new chat."];
  }
  const log = requestId ? ` Its log has more about request ${requestId}.` : "";
  return ["The server could not finish the answer.", `Retry.${log}`];
}

function problem(what, advice, { detail = "", action = null } = {}) {
  return { what, advice, detail: detail === what ? "" : detail, action };
}
