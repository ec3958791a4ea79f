// JSON schemas as a tree of fields. Parts are made when they are opened: schemas refer to themselves.

import { make } from "../dom.js";

export class SchemaTree {
  // `document`: the OpenAPI document that references point into.
  constructor(document) {
    this.document = document;
  }

  resolve(schema) {
    if (!schema.$ref) return schema;
    return schema.$ref.slice(2).split("/").reduce((part, name) => part[name], this.document);
  }

  // Returns the fields of a schema; those that are refused unless they ask for nothing are folded.
  fields(schema) {
    const { properties = {}, required = [] } = this.resolve(schema);
    const all = Object.entries(properties).map(
      ([name, field]) => ({ name, field, isRequired: required.includes(name) }));
    const refused = all.filter(({ field }) => field.description && field.enum?.includes(null));
    const shown = all.filter(one => !refused.includes(one)).sort((one, other) => other.isRequired - one.isRequired);
    const list = some => make("ul", { class: "fields" }, ...some.map(one => this.field(one)));
    if (!refused.length) return [list(shown)];
    const title = make("summary", {}, `Fields without support: ${refused.length}`);
    return [list(shown), make("details", { class: "more" }, title, list(refused))];
  }

  field({ name, field, isRequired }) {
    const type = field.enum && field.description ? field.description : this.type(field) + preset(field);
    const title = [
      make("code", {}, name),
      " ",
      make("span", { class: "type" }, type),
      ...(isRequired ? [" ", make("span", { class: "required" }, "required")] : []),
    ];
    const parts = this.parts(field);
    return make("li", {}, ...(parts.length ? [this.opened(title, parts)] : title));
  }

  opened(title, parts) {
    const node = make("details", {
      toggle: () => {
        if (!node.open || node.children.length > 1) return;
        node.append(...parts.map(part => make("div", {}, ...this.named(part, parts.length > 1), ...this.fields(part))));
      },
    }, make("summary", {}, ...title));
    return node;
  }

  named(part, isOneOfSeveral) {
    const { title } = this.resolve(part);
    return isOneOfSeveral && title ? [make("span", { class: "type" }, title)] : [];
  }

  // Returns the schemas below a field that have fields of their own.
  parts(schema, depth = 0) {
    const found = this.resolve(schema);
    if (depth > 6) return [];
    if (found.properties && Object.keys(found.properties).length) return [schema];
    const below = [...(found.anyOf ?? []), ...(found.oneOf ?? []), ...(found.items ? [found.items] : [])];
    return below.flatMap(part => this.parts(part, depth + 1));
  }

  // Returns the type of a value in words, with its limits.
  type(schema, depth = 0) {
    const found = this.resolve(schema);
    if (schema.$ref && found.properties) return found.title ?? "object";
    if ("const" in found) return JSON.stringify(found.const);
    if (found.enum) return found.enum.filter(value => value !== null).map(value => JSON.stringify(value)).join(" | ");
    const choices = found.anyOf ?? found.oneOf;
    if (choices && !found.properties) {
      if (depth > 3) return "any";
      const types = choices.map(part => this.type(part, depth + 1)).filter(text => text !== "null");
      return [...new Set(types)].join(" | ") || "null";
    }
    if (found.type === "array") {
      return `array of ${found.items ? this.type(found.items, depth + 1) : "any"}${limits(found)}`;
    }
    const name = found.title && found.type !== "object" ? found.title : [found.type ?? "any"].flat().join(" | ");
    return `${name}${limits(found)}`;
  }
}

const preset = ({ default: value }) => ((value ?? null) === null ? "" : `, default ${JSON.stringify(value)}`);

// The bounds of a number that a person would want to know; those of 32 and 64 bits are none.
function limits(schema) {
  const bounds = [];
  const add = (sign, value) => value !== undefined && Math.abs(value) < 2 ** 31 - 1 && bounds.push(`${sign} ${value}`);
  add("≥", schema.minimum);
  add(">", schema.exclusiveMinimum);
  add("≤", schema.maximum);
  add("<", schema.exclusiveMaximum);
  if (schema.maxItems) bounds.push(`up to ${schema.maxItems}`);
  if (schema.maxLength) bounds.push(`up to ${schema.maxLength} characters`);
  return bounds.length ? `, ${bounds.join(", ")}` : "";
}
