// DOM nodes made without markup: no text of a model or a server is ever parsed as HTML.

// Returns an element. Properties are attributes; a function listens to the event of its name, `true` is an attribute
// without a value, and null, undefined and false leave the attribute out. Children are nodes and strings.
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const byId = id => document.getElementById(id);

// A button that copies what text() returns, and says so.
export function copyButton(label, text) {
  const button = make("button", {
    type: "button",
    class: "quiet",
    click: async () => {
      button.textContent = await copyText(text()) ? "Copied" : "Not allowed";
      setTimeout(() => { button.textContent = label; }, 1500);
    },
  }, label);
  return button;
}

// Returns whether the text is in the clipboard.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages of plain HTTP have no clipboard interface; a selection can be copied there.
    const box = make("textarea", { class: "unseen" });
    box.value = text;
    document.body.append(box);
    box.select();
    const copied = document.execCommand("copy");
    box.remove();
    return copied;
  }
}

// Offers the text as a file.
export function download(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
