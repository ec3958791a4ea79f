// A question and its answer on the page, with what can be done with them.

import { copyButton, make } from "../dom.js";
import { AnswerPart } from "./answer_part.js";

export class ExchangeView {
  // `actions`: retry(), edit(question), openSettings(); `onGrow` as in AnswerPart.
  constructor(exchange, actions, onGrow) {
    this.exchange = exchange;
    this.actions = actions;
    this.onGrow = onGrow;
    this.user = make("article", { class: "message user" });
    this.parts = make("div");
    this.waiting = make("div", { class: "waiting" });
    this.note = make("span", { class: "speed" });
    this.buttons = make("div", { class: "actions" }, this.note);
    const heading = make("h2", { class: "unseen" }, "Assistant");
    this.answer = make("article", { class: "message answer" }, heading, this.parts, this.buttons);
    this.node = make("section", {}, this.user, this.answer);
    this.showQuestion();
  }

  // Shows an exchange that is complete.
  showPast() {
    // How to show the result of each call. A file that was imported may have results without a call.
    const showResults = new Map();
    for (const message of this.exchange.messages) {
      if (message.role === "tool") {
        showResults.get(message.tool_call_id)?.(message.content);
        continue;
      }
      const part = this.beginPart();
      part.isPast = true;
      if (message.reasoning_content) part.showReasoning(message.reasoning_content);
      if (message.content) part.showText(message.content);
      part.end();
      message.tool_calls?.forEach((call, index) => {
        part.showCall(index, call.function);
        showResults.set(call.id, text => part.showResult(index, text));
      });
    }
    if (this.exchange.problem) this.showProblem(this.exchange.problem);
    this.showNote(this.exchange.note);
    this.end();
  }

  beginPart() {
    this.parts.append(this.waiting);
    const part = make("div");
    this.waiting.before(part);
    return new AnswerPart(part, this.onGrow);
  }

  showNote(text) {
    this.note.textContent = text;
    if (text) this.waiting.remove();
  }

  showProblem({ what, advice, detail, action }) {
    this.onGrow(() => this.parts.append(problemBox({ what, advice, detail, action }, this.actions.openSettings)));
  }

  // Offers what can be done once the answer has ended.
  end() {
    this.waiting.remove();
    const text = this.text();
    if (text) this.buttons.append(copyButton("Copy", () => text));
    this.buttons.append(make("button", { type: "button", class: "quiet retry", click: this.actions.retry }, "Retry"));
  }

  // Returns the text of the answer, as the model wrote it.
  text() {
    const said = this.exchange.messages.filter(message => message.role === "assistant" && message.content);
    return said.map(message => message.content).join("\n\n");
  }

  // Returns the text of the answer, as it is read.
  innerText() {
    return [...this.parts.querySelectorAll(".turn")].map(turn => turn.innerText).join("\n");
  }

  showQuestion() {
    this.user.replaceChildren(
      make("h2", { class: "unseen" }, "You"),
      make("div", { class: "turn" }, this.exchange.question),
      make("div", { class: "actions" },
        copyButton("Copy", () => this.exchange.question),
        make("button", { type: "button", class: "quiet edit-question", click: () => this.editQuestion() }, "Edit")),
    );
  }

  editQuestion() {
    const box = make("textarea", { "aria-label": "Edited question" });
    box.value = this.exchange.question;
    const send = () => box.value.trim() && this.actions.edit(box.value.trim());
    box.addEventListener("keydown", event => {
      if (event.key === "Escape") this.showQuestion();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    const hint = this.node.nextElementSibling ? "What follows is dropped." : "";
    this.user.replaceChildren(make("div", { class: "edit" }, box, make("div", { class: "buttons" },
      make("span", { class: "faint" }, hint),
      make("button", { type: "button", click: () => this.showQuestion() }, "Cancel"),
      make("button", { type: "button", class: "main", click: send }, "Send"))));
    box.focus();
  }
}

export function problemBox({ what, advice, detail, action }, openSettings) {
  return make("div", { class: "problem" },
    make("p", { class: "wrong" }, what),
    make("p", { class: "advice" }, advice),
    ...(detail ? [make("p", { class: "detail" }, detail)] : []),
    ...(action === "settings" ? [make("button", { type: "button", click: openSettings }, "Open settings")] : []));
}
