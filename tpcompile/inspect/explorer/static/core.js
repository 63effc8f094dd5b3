"use strict";
// The frame of the page: data, the place in the page's address, elements, views and search.

const Explorer = {
  data: null,          // the page's data; schedules and other large columns are decoded on demand
  views: [],           // {name, title, key, available(), show(root, place), find(words)}
  place: {},           // where the reader is: the parts of the address after "#"
};

// ---- elements -----------------------------------------------------------------------------------

// Make an element. Children are elements or text; text never becomes markup.
function element(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

// Make a table from a row of headings and rows of cells.
function table(headings, rows, attributes = {}) {
  return element("table", attributes,
    headings && element("thead", {}, element("tr", {}, headings.map((h) => element("th", { scope: "col" }, h)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell) => element("td", {}, cell))))));
}

// Let a table scroll sideways where it is wider than the screen.
function scrolled(label, content) {
  return element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label }, content);
}

function formatBytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]])
    if (count >= size) return `${formatNumber(count / size, 2)} ${unit}`;
  return `${formatNumber(count)} B`;
}

const FORMATS = new Map();   // by the number of digits; toLocaleString would make one for each number

function formatNumber(value, digits = 1) {
  if (!FORMATS.has(digits)) FORMATS.set(digits, new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
  return FORMATS.get(digits).format(value);
}

function count(number, noun, plural = `${noun}s`) {
  return `${formatNumber(number)} ${number === 1 ? noun : plural}`;
}

// ---- data ---------------------------------------------------------------------------------------

// Return the bytes of a part of the page.
async function blobOf(name) {
  const holder = document.getElementById(`blob-${name}`);
  if (!holder) return null;
  const text = holder.textContent;
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text)
    : Uint8Array.from(atob(text), (mark) => mark.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const ARRAYS = {
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array,
  int32: Int32Array, uint32: Uint32Array, float32: Float32Array, float64: Float64Array,
};

// Return the columns of a part of the page as typed arrays, by name.
async function columnsOf(name, index) {
  const bytes = await blobOf(name);
  const found = {};
  for (const [key, [dtype, offset, length]] of Object.entries(index))
    found[key] = new ARRAYS[dtype](bytes.buffer, offset, length);
  return found;
}

// ---- the place in the page ----------------------------------------------------------------------

function readPlace() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

// Return the address of a place, without parts that are undefined or "".
function hashOf(parts) {
  return "#" + Object.entries(parts).filter(([, value]) => value !== undefined && value !== null && value !== "")
    .map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
}

// Go to a place: parts that are not given stay, and those that are undefined or "" are dropped.
Explorer.go = function (parts, replace = false) {
  const hash = hashOf({ ...Explorer.place, ...parts });
  if (hash === location.hash) return Explorer.render();
  history[replace ? "replaceState" : "pushState"](null, "", hash);
  Explorer.render();
};

// Open a view at the value that is chosen, without what belongs to other views.
Explorer.open = function (view) {
  const { c, pass, node } = Explorer.place;
  Explorer.place = {};
  Explorer.go({ view, c, pass, node });
};

Explorer.link = function (text, parts, attributes = {}) {
  return element("a", {
    href: hashOf(parts), ...attributes,
    onclick: (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      Explorer.go(parts);
    },
  }, text);
};

Explorer.view = function (view) {
  Explorer.views.push(view);
};

// Show the view of the current place. A view gets an element to fill, and the place.
Explorer.render = function () {
  const place = Explorer.place = readPlace();
  const usable = Explorer.views.filter((view) => view.available());
  const current = usable.find((view) => view.name === place.view) || usable[0];
  for (const tab of document.querySelectorAll("#tabs button"))
    tab.setAttribute("aria-selected", String(tab.dataset.view === current.name));
  const root = document.getElementById("view");
  if (Explorer.shown !== current) {
    if (Explorer.shown && Explorer.shown.hide) Explorer.shown.hide();
    root.replaceChildren();
    root.className = `view-${current.name}`;
    root.setAttribute("aria-label", current.title);
    Explorer.shown = current;
  }
  document.body.dataset.view = current.name;
  unfoldDetails(Boolean(place.node || place.instruction));
  current.show(root, place);
};

// Replace the contents of the panel with details.
Explorer.details = function (...children) {
  document.getElementById("details").replaceChildren(...children.flat(Infinity).filter(Boolean));
};

// Show or fold the panel of details. Only narrow screens fold it, where it covers a part of the view.
function unfoldDetails(open) {
  document.getElementById("fold").setAttribute("aria-expanded", String(open));
}

function setUpFold() {
  const button = document.getElementById("fold");
  button.addEventListener("click", () => unfoldDetails(button.getAttribute("aria-expanded") !== "true"));
}

// ---- theme, keys and search ---------------------------------------------------------------------

Explorer.onTheme = [];   // callbacks of what is drawn on a canvas

// Store the theme if one is given, and return the last one. Browsers may refuse storage to files.
function storedTheme(theme) {
  try {
    if (theme) localStorage.setItem("tpcompile-theme", theme);
    return localStorage.getItem("tpcompile-theme");
  } catch {
    return null;
  }
}

function setUpTheme() {
  const root = document.documentElement, last = storedTheme();
  if (["light", "dark"].includes(last)) root.dataset.theme = last;
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    storedTheme(root.dataset.theme);
    for (const callback of Explorer.onTheme) callback();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const callback of Explorer.onTheme) callback();
  });
}

const KEYS = [
  ["/", "search"],
  ["Esc", "leave the search, or close what is open"],
  ["?", "this list"],
];

function setUpKeys() {
  const dialog = document.getElementById("keys");
  const open = () => {
    const usable = Explorer.views.filter((view) => view.available()).length;
    const rows = [[`1 … ${usable}`, "go to a view"], ...KEYS, ...Explorer.views.flatMap((view) => view.keys || [])];
    dialog.replaceChildren(
      element("h2", {}, "Keyboard shortcuts"),
      table(null, rows.map(([key, what]) => [element("kbd", {}, key), what])),
      element("form", { method: "dialog" }, element("button", {}, "Close")));
    dialog.showModal();
  };
  document.getElementById("help").addEventListener("click", open);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || typing || dialog.open) return;
    const usable = Explorer.views.filter((view) => view.available());
    if (event.key === "/") document.getElementById("search").focus();
    else if (event.key === "?") open();
    else if (/^[1-9]$/.test(event.key) && usable[event.key - 1])
      Explorer.open(usable[event.key - 1].name);
    else if (Explorer.shown && Explorer.shown.onKey && Explorer.shown.onKey(event)) { /* handled */ }
    else return;
    event.preventDefault();
  });
}

const MOST_FOUND = 60;

// Return a function that says whether a text has all of the words. Underscores do not count, and
// `layer 3` and `rank 1` are one word each, of which 3 is a whole number.
function matcher(words) {
  const plain = (text) => text.toLowerCase().replaceAll("_", "");
  const parts = (plain(words).match(/(?:layer|rank) \d+|\S+/g) || []).map((part) => {
    const escaped = part.replace(/[^\w\s]/g, "\\$&");
    return new RegExp(/^(?:layer|rank) /.test(part) ? `${escaped}(?!\\d)` : escaped);
  });
  return (text) => parts.every((part) => part.test(plain(text)));
}

function setUpSearch() {
  const box = document.getElementById("search");
  const list = document.getElementById("found");
  const close = () => { list.hidden = true; list.replaceChildren(); };
  const choose = (found) => { close(); box.value = ""; box.blur(); Explorer.go(found.place); };
  const search = () => {
    const words = box.value.trim().toLowerCase();
    if (!words) return close();
    const found = [];
    for (const view of Explorer.views)
      if (view.find && view.available() && found.length < MOST_FOUND)
        found.push(...view.find(words, MOST_FOUND - found.length));
    list.replaceChildren(...found.map((one) => element("button", {
      type: "button", role: "option", onclick: () => choose(one),
    }, element("span", { class: "kind" }, one.kind), " ", one.text)));
    if (!found.length) list.append(element("p", {}, "Nothing found"));
    list.hidden = false;
    box.onenter = found.length ? () => choose(found[0]) : null;
  };
  box.addEventListener("input", search);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { close(); box.blur(); }
    if (event.key === "Enter" && box.onenter) box.onenter();
    if (event.key === "ArrowDown" && list.firstChild) { list.firstChild.focus(); event.preventDefault(); }
  });
  list.addEventListener("keydown", (event) => {
    const next = { ArrowDown: "nextSibling", ArrowUp: "previousSibling" }[event.key];
    if (event.key === "Escape") { close(); box.focus(); }
    if (!next) return;
    (document.activeElement[next] || box).focus();
    event.preventDefault();
  });
}

Explorer.start = async function () {
  Explorer.data = JSON.parse(new TextDecoder().decode(await blobOf("page")));
  document.getElementById("title").textContent = Explorer.data.title;
  const usable = Explorer.views.filter((view) => view.available());
  document.getElementById("tabs").append(...usable.map((view, place) => element("button", {
    type: "button", role: "tab", "data-view": view.name, title: `Key ${place + 1}`,
    "aria-controls": "view", "aria-selected": "false", onclick: () => Explorer.open(view.name),
  }, view.title)));
  setUpTheme();
  setUpKeys();
  setUpSearch();
  setUpFold();
  addEventListener("popstate", Explorer.render);
  addEventListener("hashchange", Explorer.render);
  Explorer.render();
  document.body.dataset.ready = "true";
};
