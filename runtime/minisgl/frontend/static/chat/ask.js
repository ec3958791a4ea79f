// One question: requests and calls of tools until the model answers with text.

import { streamChat } from "./api.js";
import { explain } from "./problems.js";
import { DEFINITIONS, runTool } from "./tools.js";

const MAX_ROUNDS = 8;

// Fills the exchange { question, messages, note, problem } as the answer arrives, and shows it in `view`. `earlier` are
// the messages before the question; `options` the fields of the request that the person has set. Does not throw.
export async function ask(exchange, { earlier, model, options, useTools, key, signal, view }) {
  const said = [], pace = new Pace();
  let part = null, message = null, ended = "";
  const report = () => view.showNote([pace.text(), ended].filter(Boolean).join(" · "));
  try {
    for (let round = 1; ; round++) {
      part = view.beginPart();
      message = { role: "assistant", content: "" };
      const calls = [];
      const body = {
        model,
        messages: [...earlier, { role: "user", content: exchange.question }, ...said],
        stream: true,
        stream_options: { include_usage: true },
        ...options,
        ...(useTools && { tools: DEFINITIONS }),
      };
      pace.beginRound();
      await streamChat(body, {
        key, signal,
        take({ usage, choices: [choice] }) {
          if (usage) pace.count(usage.completion_tokens);
          if (choice && takeDelta(choice.delta, message, calls, part)) pace.addToken();
          if (choice?.finish_reason === "length") ended = "cut at the length limit";
          report();
        },
      });
      part.end();
      if (!calls.length || ended) break;
      if (round === MAX_ROUNDS) {
        const error = new Error(`the model called tools ${MAX_ROUNDS} times in a row`);
        throw Object.assign(error, { advice: "Ask in other words, or switch Tools off, then retry." });
      }
      const called = calls.map(({ id, ...call }) => ({ id, type: "function", function: call }));
      said.push({ ...message, tool_calls: called });
      called.forEach((call, index) => {
        const content = runTool(call);
        part.showResult(index, content);
        said.push({ role: "tool", tool_call_id: call.id, content });
      });
      message = null;
    }
  } catch (error) {
    if (error.name === "AbortError") {
      ended = "stopped";
    } else {
      ended = "not complete";
      exchange.problem = explain(error);
      view.showProblem(exchange.problem);
    }
  }
  part?.end();
  report();
  // A chat goes on only behind a text: calls without results are no part of it.
  exchange.messages = message?.content ? [...said, message] : [];
  exchange.note = [pace.text(), ended].filter(Boolean).join(" · ");
}

// Adds a delta of the stream to the message; returns whether it had anything to show.
function takeDelta(delta, message, calls, part) {
  const { content, reasoning, reasoning_content: thought = reasoning, tool_calls: pieces } = delta;
  if (thought) {
    message.reasoning_content = (message.reasoning_content ?? "") + thought;
    part.showReasoning(message.reasoning_content);
  }
  if (content) {
    message.content += content;
    part.showText(message.content);
  }
  for (const { index, id, function: { name, arguments: piece } = {} } of pieces ?? []) {
    const call = calls[index] ??= { id, name: "", arguments: "" };
    call.name += name ?? "";
    call.arguments += piece ?? "";
    part.showCall(index, call);
  }
  return Boolean(thought || content || pieces?.length);
}

// Tokens and times of the rounds of an answer. The time of a round counts from its request: its tokens may have been
// held back on the way and come all at once.
class Pace {
  began = performance.now();
  first = 0;
  tokens = 0;
  seconds = 0;

  beginRound() {
    this.tokensBefore = this.tokens;
    this.secondsBefore = this.seconds;
    this.roundBegan = performance.now();
  }

  count(tokens) {
    this.tokens = this.tokensBefore + tokens;
  }

  addToken() {
    const now = performance.now();
    this.first ||= now;
    this.seconds = this.secondsBefore + (now - this.roundBegan) / 1000;
    this.tokens++;
  }

  text() {
    if (!this.first) return "";
    const parts = [`${this.tokens} tokens`, `first after ${(this.first - this.began).toFixed(0)} ms`];
    if (this.seconds > 0) parts.push(`${(this.tokens / this.seconds).toFixed(1)} tokens/s`);
    return parts.join(" · ");
  }
}
