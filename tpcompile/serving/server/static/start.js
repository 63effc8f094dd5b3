// The page: a conversation, the box to write in, and the server's model.

import { ask, chatBody, newAnswer, openCalls, textBody } from "./conversation.js";
import { byId, element, stored } from "./dom.js";
import { answerElement, showActions, userElement } from "./messages.js";
import { closeSettings, openSettings, readSettings, setUpSettings, showSettings } from "./settings.js";
import { send } from "./stream.js";

const chat = {
  model: null,        // the name that the server gives its model, when it is known
  messages: [],       // of the conversation, the last one at the end
  elements: [],       // of the messages
  running: null,      // the controller of the request that runs
  replaced: null,     // the messages that an edited one replaces
};

// ---- the model ----------------------------------------------------------------------------------

// Ask the server for its model, and choose the mode that it can.
async function findModel() {
  try {
    const { data: [model] } = await (await send("v1/models", byId("key").value)).json();
    const length = model.max_model_len ? `, ${model.max_model_len.toLocaleString("en")} tokens` : "";
    chat.model = model.id;
    byId("model").textContent = `${model.id}${length}`;
    document.title = `${model.id} · tpcompile`;
    const only = model.chat === false;
    byId("mode").options[0].disabled = only;
    byId("mode-note").hidden = !only;
    if (only) byId("mode").value = "text";
    showSettings();
    if (!chat.messages.length) showEmpty();
  } catch (error) {
    showEmpty(error.message);
    if (error.status === 401) openSettings(byId("key"));
  }
}

function showEmpty(problem = "") {
  const text = byId("mode").value === "text";
  byId("log").replaceChildren(element("div", { class: "empty" },
    element("p", {}, text ? "Write the beginning of a text." : "What do you want to ask?"),
    problem ? element("p", { class: "error", role: "alert" }, problem) : null));
}

// ---- the conversation ---------------------------------------------------------------------------

function add(message, made) {
  if (!chat.messages.length) byId("log").replaceChildren();
  chat.messages.push(message);
  chat.elements.push(made);
  byId("log").append(made);
}

// Take messages away from a place on, and return them.
function take(from) {
  for (const made of chat.elements.splice(from)) made.remove();
  const taken = chat.messages.splice(from);
  if (!chat.messages.length) showEmpty();
  return taken;
}

// Show a change of the conversation, and its end if the reader was there.
function follow(change) {
  const log = byId("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function say(text) {
  byId("status").textContent = text;
}

// Offer actions at the last messages, and none while an answer comes.
function offer() {
  const last = chat.messages.length - 1;
  chat.messages.forEach((message, place) => {
    const free = !chat.running, answer = message.role !== "user";
    const asked = chat.messages.findLastIndex((one) => one.role === "user");
    showActions(chat.elements[place], message, {
      retry: free && place === last && answer ? () => retry(place) : null,
      edit: free && place === asked ? () => edit(place) : null,
      more: free && place === last && message.role === "text" ? () => continueText(message.prompt + message.content) : null,
    });
  });
}

// Send the conversation, and show the answer as it comes.
async function answer(settings, message, path, body) {
  const made = answerElement(message, () => converse());
  add(message, made);
  byId("log").scrollTop = byId("log").scrollHeight;
  const controller = chat.running = new AbortController();
  showRunning();
  say("Waiting for the answer");
  let frame = null;
  const changed = () => {
    frame ??= requestAnimationFrame(() => {
      frame = null;
      follow(() => made.update(false));
    });
  };
  await ask(message, path, settings.key, body, controller.signal, changed);
  if (frame !== null) cancelAnimationFrame(frame);
  if (chat.running !== controller) return;   // a new chat has begun meanwhile
  chat.running = null;
  follow(() => {
    made.update(true);
    showRunning();
  });
  say(message.error ? `Error: ${message.error.message}` : message.stopped ? "Stopped" : `Answer: ${message.content || callWords(message)}`);
  if (message.error?.status === 401) openSettings(byId("key"));
}

function callWords({ calls }) {
  return calls.map(({ name }) => `calls ${name}`).join(", ") || "nothing";
}

// Ask for the answer to the messages so far.
function converse() {
  const settings = readSettings();
  if (!settings) return false;
  const message = { ...newAnswer(), json: Boolean(settings.schema) };
  answer(settings, message, "v1/chat/completions", chatBody(chat.messages, chat.model ?? undefined, settings));
  return true;
}

function continueText(prompt) {
  const settings = readSettings();
  if (!settings) return false;
  answer(settings, { ...newAnswer(), role: "text", prompt }, "v1/completions", textBody(prompt, chat.model ?? undefined, settings));
  return true;
}

// Send what is in the box, which stays there if a setting is wrong.
function submit() {
  const box = byId("prompt"), text = box.value;
  if (chat.running || !text.trim()) return;
  if (byId("mode").value === "text") {
    if (!continueText(text)) return;
  } else {
    if (openCalls(chat.messages).length) {
      say("Give the results of the calls first");
      byId("log").querySelector(".call textarea")?.focus();
      return;
    }
    if (!readSettings()) return;
    const message = { role: "user", content: text.trim() };
    add(message, userElement(message));
    converse();
  }
  box.value = "";
  endEdit();
  fitBox();
}

function retry(place) {
  const [message] = take(place);
  if (message.role === "text") continueText(message.prompt);
  else converse();
}

// Put a message back into the box. What followed it comes back if the reader cancels.
function edit(place) {
  chat.replaced = take(place);
  byId("prompt").value = chat.replaced[0].content;
  byId("editing").hidden = false;
  fitBox();
  byId("prompt").focus();
}

function endEdit() {
  chat.replaced = null;
  byId("editing").hidden = true;
}

function cancelEdit() {
  for (const message of chat.replaced) {
    const made = message.role === "user" ? userElement(message) : answerElement(message, () => converse());
    add(message, made);
    made.update?.(true);
  }
  byId("prompt").value = "";
  endEdit();
  fitBox();
  offer();
  byId("prompt").focus();
}

function newChat() {
  chat.running?.abort();
  chat.running = null;
  endEdit();
  take(0);
  showEmpty();
  showRunning();
  say("New chat");
  byId("prompt").focus();
}

// ---- the frame ----------------------------------------------------------------------------------

function showRunning() {
  const running = Boolean(chat.running);
  const focused = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("stop").hidden = !running;
  byId("send").hidden = running;
  if (focused) byId("prompt").focus();
  offer();
}

// Make the box as high as its text, up to a limit that the styles set.
function fitBox() {
  const box = byId("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function onKey(event) {
  if (event.key !== "Escape" || event.isComposing) return;
  if (chat.running) chat.running.abort();
  else if (!byId("settings").hidden) closeSettings();
  else if (chat.replaced) cancelEdit();
}

function setUpTheme() {
  const root = document.documentElement, name = "tpcompile-theme", last = stored.get("localStorage", name);
  if (["light", "dark"].includes(last)) root.dataset.theme = last;
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    stored.set("localStorage", name, root.dataset.theme);
  });
}

byId("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
byId("prompt").addEventListener("input", fitBox);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
byId("stop").addEventListener("click", () => chat.running?.abort());
byId("new").addEventListener("click", newChat);
byId("cancel").addEventListener("click", cancelEdit);
byId("key").addEventListener("change", findModel);
document.addEventListener("keydown", onKey);
setUpTheme();
setUpSettings(() => { if (!chat.messages.length) showEmpty(); });
byId("prompt").focus();
await findModel();
document.body.dataset.ready = "true";
