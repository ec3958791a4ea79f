// The dialog of settings: a system prompt and sampling parameters for all chats, and the API key.

import { byId } from "../dom.js";

const NAME = "minisgl.settings";

export class Settings {
  // `onKey` is called when the key has changed.
  constructor(storage, onKey) {
    this.storage = storage;
    this.dialog = byId("settings");
    this.key = "";
    const form = this.dialog.querySelector("form");
    this.system = form.elements.system;
    this.numbers = [...form.querySelectorAll("input[type=number]")];
    this.fill(this.load());
    this.dialog.addEventListener("close", () => {
      // Escape closes it with an invalid value too, which is not sent and must not seem to be.
      this.fill({ system: this.system.value, ...this.parameters() });
      this.store();
      const key = byId("key").value.trim();
      if (key === this.key) return;
      this.key = key;
      onKey();
    });
    byId("clear-settings").addEventListener("click", () => this.fill({}));
  }

  open() {
    this.dialog.showModal();
  }

  // Returns the messages that begin each chat.
  opening() {
    const content = this.system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  // Returns the parameters that have a valid value.
  parameters() {
    const set = this.numbers.filter(({ value, validity }) => value !== "" && validity.valid);
    return Object.fromEntries(set.map(({ name, valueAsNumber }) => [name, valueAsNumber]));
  }

  fill(values) {
    for (const field of [this.system, ...this.numbers]) field.value = values[field.name] ?? "";
  }

  load() {
    try {
      return JSON.parse(this.storage.getItem(NAME)) ?? {};
    } catch {
      return {};
    }
  }

  store() {
    try {
      this.storage.setItem(NAME, JSON.stringify({ system: this.system.value, ...this.parameters() }));
    } catch {
      // A full storage: they count until the page is closed.
    }
  }
}
