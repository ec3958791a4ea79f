// The reference of the API, from the OpenAPI document of this server.

import { byId, make } from "../dom.js";
import { curlExample } from "./example.js";
import { SchemaTree } from "./schema.js";

let key = "";

async function load() {
  let response, problem = "";
  try {
    response = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  } catch {
    problem = "The server cannot be reached. Check that it runs, then reload this page.";
  }
  if (response?.status === 401) return askForKey();
  if (response && !response.ok) problem = `The server answered with HTTP ${response.status}. Reload this page.`;
  if (problem) byId("operations").replaceChildren(make("p", { class: "wrong" }, problem));
  else show(await response.json());
}

function askForKey() {
  byId("operations").replaceChildren();
  byId("key-problem").textContent = key ? "The server does not know this key." : "";
  byId("key-form").hidden = false;
  byId("key").focus();
}

function show(document) {
  byId("key-form").hidden = true;
  byId("version").textContent = document.info.version;
  const tree = new SchemaTree(document);
  byId("operations").replaceChildren(...document.tags.flatMap(({ name }) => [
    make("h2", {}, name),
    ...Object.entries(document.paths).flatMap(([path, operations]) => Object.entries(operations)
      .filter(([, operation]) => operation.tags.includes(name))
      .map(([method, operation]) => showOperation(tree, method, path, operation))),
  ]));
  // A link to /docs#/v1/models opens that operation.
  const linked = byId(decodeURIComponent(location.hash.slice(1)));
  if (linked) {
    linked.open = true;
    linked.scrollIntoView();
  }
}

function showOperation(tree, method, path, operation) {
  const node = make("details", {
    id: path,
    class: "operation",
    toggle: () => {
      if (node.open && node.children.length === 1) node.append(details(tree, method, path, operation));
    },
  }, make("summary", {},
    make("span", { class: "method" }, method.toUpperCase()),
    make("code", {}, path),
    make("span", { class: "faint" }, operation.summary)));
  return node;
}

function details(tree, method, path, operation) {
  const media = operation.requestBody?.content["application/json"];
  const parts = [make("h3", {}, "Example"), curlExample(method, path, media?.example, key !== "")];
  if (operation.parameters) {
    const properties = Object.fromEntries(operation.parameters.map(({ name, schema }) => [name, schema]));
    const required = operation.parameters.filter(one => one.required).map(({ name }) => name);
    parts.push(make("h3", {}, "Parameters"), ...tree.fields({ properties, required }));
  }
  for (const schema of media ? media.schema.anyOf ?? [media.schema] : []) {
    parts.push(make("h3", {}, media.schema.anyOf ? `Body: ${tree.type(schema)}` : "Body"), ...tree.fields(schema));
  }
  const responses = Object.entries(operation.responses).map(([status, { description }]) => make("li", {},
    make("code", {}, status), " ", make("span", { class: "type" }, description)));
  parts.push(make("h3", {}, "Responses"), make("ul", { class: "fields" }, ...responses));
  return make("div", {}, ...parts);
}

byId("key-form").addEventListener("submit", event => {
  event.preventDefault();
  key = byId("key").value.trim();
  load();
});
await load();
