// Run the Vercel AI SDK against a server; try_clients.py calls it in a directory with node_modules:
//
//     npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { generateText, jsonSchema, Output, streamText, tool } = require("ai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const [url, name] = process.argv.slice(2);
const api = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(api);
const models = {
  responses: openai.responses(name),
  chat: openai.chat(name),
  compatible: createOpenAICompatible({ ...api, name: "served", supportsStructuredOutputs: true })(name),
  messages: createAnthropic(api)(name),
};
const city = jsonSchema({
  type: "object",
  properties: { city: { type: "string", minLength: 1, maxLength: 12 }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
});
const check = ({ city, days }) => assert(typeof city === "string" && Number.isInteger(days));

for (const [kind, model] of Object.entries(models)) {
  const common = { model, maxOutputTokens: 400, maxRetries: 0, prompt: "Weather in Bonn?" };
  const forced = { ...common, tools: { weather: tool({ inputSchema: city }) }, toolChoice: { type: "tool", toolName: "weather" } };
  const called = await generateText(forced);
  assert.equal(called.toolCalls.length, 1, kind);
  check(called.toolCalls[0].input);

  const parts = [];
  const stream = streamText({ ...forced, onError: ({ error }) => { throw error; } });
  for await (const part of stream.fullStream) parts.push(part.type);
  check((await stream.toolCalls)[0].input);
  assert(parts.includes("tool-input-delta") && parts.at(-1) === "finish", `${kind}: ${parts}`);

  const { output } = await generateText({ ...common, output: Output.object({ schema: city }) });
  check(output);

  const result = { type: "tool-result", toolCallId: called.toolCalls[0].toolCallId, toolName: "weather", output: { type: "text", value: "sunny" } };
  const messages = [{ role: "user", content: common.prompt }, ...called.response.messages, { role: "tool", content: [result] }];
  const { prompt, ...rest } = common;
  const after = streamText({ ...rest, messages, tools: forced.tools, maxOutputTokens: 8 });
  await after.consumeStream();
  assert.equal(await after.finishReason, "length", kind);
}
console.log("`generateText`, `streamText` and `Output.object`, with tools and their results, over responses, chats and Messages");
