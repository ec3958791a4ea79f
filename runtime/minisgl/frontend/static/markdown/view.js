// Markdown text that grows, as DOM nodes of which only the last change.

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
      if (shown?.code && block.type === "code" && block.language === shown.code.language) {
        shown.code.update(block.text);
        shown.source = source;
        return;
      }
      const code = block.type === "code" ? new CodeBlock(block) : null;
      const node = code?.node ?? renderBlock(block);
      if (shown) shown.node.replaceWith(node);
      else this.node.append(node);
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
