// Elements, and stored values. Text of models and servers becomes text nodes, never markup.

export const byId = (id) => document.getElementById(id);

// Make an element. Children are elements or text.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

export function button(text, onclick, attributes = {}) {
  return element("button", { type: "button", onclick, ...attributes }, text);
}

// Make a button that copies a text, and says so.
export function copyButton(text, label = "Copy") {
  const made = button(label, async () => {
    made.textContent = await copied(text()) ? "Copied" : "Not allowed";
    setTimeout(() => { made.textContent = label; }, 1500);
  });
  return made;
}

// Copy a text. Pages that are neither encrypted nor local have no clipboard but the selection's.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const holder = element("textarea", { class: "unseen", "aria-hidden": "true" });
    holder.value = text;
    const focused = document.activeElement;
    document.body.append(holder);
    holder.select();
    const done = document.execCommand("copy");
    holder.remove();
    focused?.focus();
    return done;
  }
}

// Read and write storage, which browsers may refuse.
export const stored = {
  get(storage, key) {
    try { return window[storage].getItem(key); } catch { return null; }
  },
  set(storage, key, value) {
    try { window[storage].setItem(key, value); } catch { /* the value lasts as long as the page */ }
  },
};
