// The model that is asked, and the controls that it has.

import { byId, make } from "../dom.js";
import { fetchModels } from "./api.js";
import { explain } from "./problems.js";

const NAME = "minisgl.model";
const RETRY_MS = 3000;

export class Models {
  // `key()` returns the API key; `onChange(problem)` is called when the models are known, or why they are not.
  constructor(storage, key, onChange) {
    this.storage = storage;
    this.key = key;
    this.onChange = onChange;
    this.list = [];
    this.name = "";
    this.timer = 0;
  }

  get capabilities() {
    return this.list.find(model => model.id === this.name)?.capabilities ?? [];
  }

  // What the model is served for; text is generated unless the server says otherwise.
  get task() {
    return this.list.find(model => model.id === this.name)?.task ?? "generate";
  }

  // Asks the server for its models; again after a while where it has none yet.
  async load() {
    clearTimeout(this.timer);
    let problem = null;
    try {
      this.list = await fetchModels(this.key());
      const wanted = this.name || this.storage.getItem(NAME);
      this.name = this.list.some(model => model.id === wanted) ? wanted : this.list[0]?.id ?? "";
    } catch (error) {
      this.list = [];
      problem = explain(error);
      // Only what the person does helps against other errors.
      if (!error.status || error.status >= 500) this.timer = setTimeout(() => this.load(), RETRY_MS);
    }
    this.show();
    this.onChange(problem);
  }

  show() {
    byId("model").replaceChildren(this.list.length > 1 ? this.select() : this.list[0]?.id ?? "no model");
    byId("model").title = this.list.length === 1 ? this.name : "";
    byId("thinking-control").hidden = !this.capabilities.includes("reasoning_switch");
    byId("tools-control").hidden = !this.capabilities.includes("tools");
  }

  select() {
    const options = this.list.map(({ id }) => make("option", { selected: id === this.name }, id));
    return make("select", {
      "aria-label": "Model",
      change: event => {
        this.name = event.target.value;
        this.storage.setItem(NAME, this.name);
        this.show();
        this.onChange(null);
      },
    }, ...options);
  }
}
