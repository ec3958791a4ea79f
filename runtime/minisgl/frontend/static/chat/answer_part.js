// What one request brings, as it arrives: reasoning, text and calls of tools.

import { make } from "../dom.js";
import { MarkdownView } from "../markdown/view.js";

export class AnswerPart {
  // `onGrow` is called around each change of the page, with a function that makes it.
  constructor(node, onGrow) {
    this.node = node;
    this.onGrow = onGrow;
    this.calls = [];
    this.texts = {};
    this.frame = 0;
  }

  // Text may come faster than a screen shows it: it is drawn once for each frame.
  showText(text) {
    this.endReasoning();
    this.draw("text", text);
  }

  showReasoning(text) {
    if (!this.thinking) {
      this.thinking = make("details", { class: "thinking" }, make("summary", {}, "Thinking…"), make("div"));
      this.thinkingSince = performance.now();
      this.node.append(this.thinking);
    }
    this.draw("reasoning", text);
  }

  endReasoning() {
    if (!this.thinking || this.hasThought) return;
    this.hasThought = true;
    const seconds = (performance.now() - this.thinkingSince) / 1000;
    this.thinking.firstChild.textContent = this.isPast ? "Thoughts" : `Thought for ${seconds.toFixed(1)} s`;
  }

  draw(kind, text) {
    this.texts[kind] = text;
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { reasoning, text } = this.texts;
    this.texts = {};
    this.onGrow(() => {
      if (reasoning !== undefined) this.thinking.lastChild.textContent = reasoning;
      if (text === undefined) return;
      if (!this.markdown) {
        const turn = make("div", { class: "turn markdown" });
        this.node.append(turn);
        this.markdown = new MarkdownView(turn);
      }
      this.markdown.update(text);
    });
  }

  showCall(index, { name, arguments: text }) {
    this.endReasoning();
    this.flush();
    this.onGrow(() => {
      if (!this.calls[index]) this.node.append(this.calls[index] = make("div", { class: "call" }));
      this.calls[index].replaceChildren(make("b", {}, name), `(${text})`);
    });
  }

  showResult(index, text) {
    this.onGrow(() => this.calls[index].append(make("span", { class: "result" }, text)));
  }

  end() {
    this.endReasoning();
    this.flush();
  }
}
