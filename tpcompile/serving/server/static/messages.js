// The messages of a conversation as elements, which follow their data.

import { button, copyButton, element } from "./dom.js";
import { ratesOf } from "./conversation.js";
import { codeBlock, showMarkdown } from "./markdown.js";

const FINISHES = { length: "cut off at the limit of new tokens", content_filter: "ended by a filter" };

export function userElement(message) {
  return element("article", { class: "user", "aria-label": "You" },
    element("div", { class: "bubble" }, message.content), element("div", { class: "actions" }));
}

// Make the element of an answer, with `update`, which shows what has changed in the answer.
// `continued` is called when all of its calls have results.
export function answerElement(answer, continued) {
  const thinking = element("div", { class: "thoughts" });
  const summary = element("summary");
  const parts = {
    details: element("details", { class: "thinking", hidden: true }, summary, thinking), summary, thinking,
    prompt: element("span", { class: "quiet" }, answer.prompt ?? ""), text: element("span"),
    content: element("div", { class: "content" }),
    calls: element("div", { class: "calls" }),
    error: element("p", { class: "error", hidden: true }),
    rates: element("p", { class: "rates quiet" }),
    actions: element("div", { class: "actions" }),
  };
  if (answer.role === "text") parts.content.append(element("p", { class: "continued" }, parts.prompt, parts.text));
  const made = element("article", { class: "assistant", "aria-label": answer.role === "text" ? "Text" : "Answer" },
    parts.details, parts.content, parts.calls, parts.error, parts.rates, parts.actions);
  made.parts = parts;
  made.update = (done) => update(made, answer, done, continued);
  made.update(false);
  return made;
}

function update(made, answer, done, continued) {
  const { parts } = made;
  made.setAttribute("aria-busy", String(!done));
  const empty = !answer.content && !answer.thinking && !answer.calls.length;
  made.classList.toggle("waiting", !done && empty);
  showThinking(parts, answer, done);
  showContent(parts, answer, done);
  showCalls(parts.calls, answer, done, continued);
  parts.error.hidden = !answer.error;
  parts.error.textContent = answer.error ? (answer.error.status ? `${answer.error.message} (status ${answer.error.status})` : answer.error.message) : "";
  parts.rates.textContent = rateWords(answer, done);
}

function showThinking({ details, summary, thinking }, answer, done) {
  details.hidden = !answer.thinking;
  if (!answer.thinking) return;
  const ended = answer.thought ?? (done ? answer.last : null);
  const seconds = ended === null ? "" : ` for ${((ended - answer.first) / 1000).toFixed(1)} s`;
  summary.textContent = ended === null ? "Thinking …" : `Thought${seconds}`;
  showMarkdown(thinking, answer.thinking);
}

function showContent({ content, text }, answer, done) {
  if (answer.role === "text") text.textContent = answer.content;
  else if (answer.json) showJson(content, answer.content, done);
  else showMarkdown(content, answer.content);
}

// Show an answer in the form of a schema: as it comes, and indented at the end.
function showJson(content, text, done) {
  let shown = text;
  try {
    if (done) shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* it was cut off, so it stays as it came */ }
  if (content.shown === shown) return;
  content.shown = shown;
  content.replaceChildren(...(shown ? [codeBlock(shown, "json")] : []));
}

// Show the calls of an answer, and fields for their results when all of them are there.
function showCalls(holder, answer, done, continued) {
  answer.calls.forEach((call, place) => {
    const card = holder.children[place] || holder.appendChild(callElement());
    card.parts.name.textContent = call.name;
    card.parts.code.textContent = indented(call.arguments, done);
  });
  if (!done || !answer.calls.length || answer.stopped || answer.error || holder.dataset.asked) return;
  holder.dataset.asked = "true";
  if (answer.calls.every((call) => call.result !== null)) showResults(holder, answer.calls);
  else askForResults(holder, answer.calls, continued);
}

function showResults(holder, calls) {
  calls.forEach((call, place) => holder.children[place].append(element("pre", { class: "result" }, call.result)));
}

function askForResults(holder, calls, continued) {
  const fields = calls.map(({ name }) => element("textarea", { rows: 2, "aria-label": `Result of ${name}`, placeholder: "The result of this call" }));
  const finish = () => {
    const empty = fields.find((field) => !field.value.trim());
    if (empty) return empty.focus();
    calls.forEach((call, place) => { call.result = fields[place].value; });
    for (const field of fields) field.remove();
    go.remove();
    showResults(holder, calls);
    continued();
  };
  const go = button(fields.length > 1 ? "Send the results" : "Send the result", finish, { class: "primary" });
  fields.forEach((field, place) => {
    holder.children[place].append(field);
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      finish();
    });
  });
  holder.append(go);
  if (document.activeElement?.id === "prompt") fields[0].focus();
}

function callElement() {
  const name = element("b"), code = element("code");
  const card = element("section", { class: "call", "aria-label": "Tool call" },
    element("p", {}, "Calls ", name), element("pre", {}, code));
  card.parts = { name, code };
  return card;
}

function indented(text, done) {
  try {
    return done ? JSON.stringify(JSON.parse(text), null, 2) : text;
  } catch {
    return text;
  }
}

// Say how fast an answer came, and why it ended.
function rateWords(answer, done) {
  const rates = ratesOf(answer);
  if (!rates) return answer.stopped ? "Stopped" : "";
  const words = [`first token after ${rates.first.toFixed(2)} s`];
  if (rates.perSecond !== null) words.push(`${rates.perSecond.toFixed(1)} tokens/s`);
  if (rates.tokens !== null) {
    const shared = answer.usage.prompt_tokens_details?.cached_tokens;
    words.push(`${rates.tokens} new tokens`, `${answer.usage.prompt_tokens} of the prompt${shared ? `, ${shared} of them cached` : ""}`);
  }
  if (answer.stopped) words.push("stopped");
  else if (done && FINISHES[answer.finish]) words.push(FINISHES[answer.finish]);
  return words.join(" · ");
}

// Offer what can be done with a message. Only the last answer can be asked for again.
export function showActions(made, message, { retry, edit, more }) {
  const { actions } = made.parts ?? { actions: made.querySelector(".actions") };
  actions.replaceChildren(...[
    message.content ? copyButton(() => (message.prompt ?? "") + message.content) : null,
    retry && button("Retry", retry), edit && button("Edit", edit), more && button("Continue further", more),
  ].filter(Boolean));
}
