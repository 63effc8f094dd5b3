// The panel of settings: values, those that are stored, and the checks of JSON.

import { byId, stored } from "./dom.js";

const FIELDS = ["mode", "system", "temperature", "top_p", "max_tokens", "seed", "thinking", "tools", "tool_choice", "schema"];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const STORE = "tpcompile-chat";

const EXAMPLES = {
  tools: [{
    type: "function",
    function: {
      name: "weather", description: "Return the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } }, required: ["city"] },
    },
  }],
  schema: {
    type: "object", properties: { name: { type: "string" }, year: { type: "integer" } }, required: ["name", "year"], additionalProperties: false,
  },
};

// Return the tools of a text: a list of them, or one. Plain functions get OpenAI's frame.
function toolsOf(text) {
  const value = JSON.parse(text), list = Array.isArray(value) ? value : [value];
  if (!list.every((tool) => typeof (tool?.function ?? tool)?.name === "string"))
    throw new Error("each tool must be an object with a function that has a name");
  return list.map((tool) => tool.function ? tool : { type: "function", function: tool });
}

function schemaOf(text) {
  const value = JSON.parse(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("a schema must be a JSON object");
  return value.json_schema?.schema ?? value.schema ?? value;
}

const READERS = { tools: toolsOf, schema: schemaOf };

// Return the value of a box of JSON: null if it is empty; undefined if it is wrong, which is shown.
function readJson(name) {
  const box = byId(name), said = byId(`${name}-error`);
  let value = null, problem = "";
  try {
    if (box.value.trim()) value = READERS[name](box.value);
  } catch (error) {
    value = undefined;
    problem = `Not usable: ${error.message}`;
  }
  box.setAttribute("aria-invalid", String(Boolean(problem)));
  said.textContent = problem;
  said.hidden = !problem;
  return value;
}

// Return the first field whose value cannot be used, if any.
function invalidField() {
  return NUMBERS.map(byId).find((field) => !field.checkValidity()) || Object.keys(READERS).filter((name) => readJson(name) === undefined).map(byId)[0];
}

// Return all settings as values, or null after showing the field that is wrong.
export function readSettings() {
  const wrong = byId("mode").value === "text" ? NUMBERS.map(byId).find((field) => !field.checkValidity()) : invalidField();
  if (wrong) {
    openSettings(wrong);
    wrong.reportValidity?.();
    return null;
  }
  const values = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));
  for (const name of NUMBERS) values[name] = values[name] === "" ? null : Number(values[name]);
  return { ...values, key: byId("key").value, tools: readJson("tools"), schema: readJson("schema") };
}

// Show or hide the panel. On a phone it covers the page, which then is out of reach of the Tab key too.
function showPanel(open) {
  byId("settings").hidden = !open;
  byId("settings-button").setAttribute("aria-expanded", String(open));
  const covers = open && getComputedStyle(byId("settings")).position === "fixed";
  for (const part of document.querySelectorAll("header, main")) part.inert = covers;
}

export function openSettings(field) {
  showPanel(true);
  field.focus();
}

export function closeSettings() {
  showPanel(false);
  byId("prompt").focus();
}

function store() {
  const values = Object.fromEntries(FIELDS.filter((name) => name !== "mode").map((name) => [name, byId(name).value]));
  stored.set("localStorage", STORE, JSON.stringify(values));
  stored.set("sessionStorage", `${STORE}-key`, byId("key").value);
}

// Put back what was stored. The key lasts as long as the tab.
function restore() {
  let values = {};
  try {
    values = JSON.parse(stored.get("localStorage", STORE)) || {};
  } catch { /* another program has written it */ }
  for (const [name, value] of Object.entries(values)) if (FIELDS.includes(name)) byId(name).value = value;
  byId("key").value = stored.get("sessionStorage", `${STORE}-key`) || "";
}

// Show which of tools and schema are in use, and hide what the mode has not.
export function showSettings() {
  const text = byId("mode").value === "text";
  document.body.dataset.mode = byId("mode").value;
  for (const name of Object.keys(READERS)) {
    const on = Boolean(byId(name).value.trim());
    byId(`${name}-button`).classList.toggle("on", on);
    byId(`${name}-button`).hidden = text;
  }
  const [label, verb] = text ? ["Text", "Continue"] : ["Message", "Send"];
  byId("prompt-label").textContent = label;
  byId("prompt").placeholder = text ? "A text to continue" : "Message";
  byId("send").textContent = verb;
}

export function setUpSettings(changed) {
  restore();
  const update = () => { store(); showSettings(); changed(); };
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  byId("options").addEventListener("change", (event) => {
    if (READERS[event.target.id]) readJson(event.target.id);
    update();
  });
  byId("settings-button").addEventListener("click", () => (byId("settings").hidden ? openSettings(byId("close")) : closeSettings()));
  byId("close").addEventListener("click", closeSettings);
  for (const name of Object.keys(READERS)) {
    byId(`${name}-button`).addEventListener("click", () => openSettings(byId(name)));
    byId(`${name}-example`).addEventListener("click", () => {
      byId(name).value = JSON.stringify(EXAMPLES[name], null, 2);
      readJson(name);
      update();
    });
  }
  byId("defaults").addEventListener("click", () => {
    for (const name of FIELDS) if (name !== "mode") byId(name).value = "";
    Object.keys(READERS).forEach(readJson);
    update();
  });
  showSettings();
}
