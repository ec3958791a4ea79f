// A command that sends an operation's example.

import { CodeBlock } from "../markdown/render.js";

// Returns a block with the command of curl; `needsKey`: with the header of an API key.
export function curlExample(method, path, body, needsKey) {
  const address = new URL(path.replace(/^\//, "").replaceAll(/\{\w+\}/g, "default"), document.baseURI).href;
  const lines = [`curl ${address}`];
  if (needsKey) lines.push('-H "Authorization: Bearer $API_KEY"');
  if (body !== undefined) {
    lines.push("-H 'Content-Type: application/json'", `-d ${quote(JSON.stringify(body))}`);
  } else if (method !== "get") {
    lines.push(`-X ${method.toUpperCase()}`);
  }
  return new CodeBlock({ language: "bash", text: lines.join(" \\\n  ") }).node;
}

// Returns a text in quotes of the shell.
const quote = text => `'${text.replaceAll("'", String.raw`'\''`)}'`;
