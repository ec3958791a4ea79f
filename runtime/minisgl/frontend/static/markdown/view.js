// Markdown text that grows, as DOM nodes of which only the last change.

import { make } from "../dom.js";
import { parseBlocks } from "./blocks.js";
import { CodeBlock, renderBlock } from "./render.js";

// Blocks at the end that more text may still change: "2" behind a list becomes its next item with a dot.
const OPEN_BLOCKS = 2;

export class MarkdownView {
  constructor(node) {
    this.node = node;
    // Characters of the text whose blocks are final.
    this.settled = 0;
    this.open = [];
  }

  // Shows the text, which begins with the one before.
  update(text) {
    const lines = text.slice(this.settled).split("\n");
    const blocks = parseBlocks(lines);
    blocks.forEach((block, number) => {
      const source = lines.slice(block.line, blocks[number + 1]?.line).join("\n").trimEnd();
      const shown = this.open[number];
      if (shown?.source === source) return;
      const { node, code } = render(block, source, shown?.code);
      if (!shown) this.node.append(node);
      else if (shown.node !== node) shown.node.replaceWith(node);
      this.open[number] = { source, node, code };
    });
    for (const { node } of this.open.splice(blocks.length)) node.remove();
    const final = blocks.length - OPEN_BLOCKS;
    if (final > 0) {
      this.settled += lines.slice(0, blocks[final].line).reduce((sum, line) => sum + line.length + 1, 0);
      this.open.splice(0, final);
    }
  }
}

// Returns the node of a block, and of code its CodeBlock: the one that is shown, if it has the same language.
function render(block, source, shown) {
  try {
    if (block.type !== "code") return { node: renderBlock(block), code: null };
    const code = shown?.language === block.language ? shown : new CodeBlock(block);
    code.update(block.text);
    return { node: code.node, code };
  } catch (error) {
    // Such as a paragraph of more nodes than a call takes arguments. It must not hide the rest of a chat.
    console.error(error);
    return { node: make("p", { class: "source" }, source), code: null };
  }
}
