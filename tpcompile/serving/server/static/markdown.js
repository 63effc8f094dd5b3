// A part of Markdown as elements: paragraphs, headings, lists, quotes, tables, code, bold and italics.
// Everything else stays text; there are no links, images or markup.

import { copyButton, element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*?)\s*$/;
const HEADING = /^(#{1,6})\s+(.+?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^>\s?/;
const ROW = /^\s*\|.*\|\s*$/;
const RULE_ROW = /^\s*\|(?:\s*:?-+:?\s*\|)+\s*$/;

// Split a text into blocks: {kind, lines}. A block of code may still be open at the end.
export function blocksOf(text) {
  const blocks = [], lines = text.replaceAll("\r\n", "\n").split("\n");
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [kind, end] = blockAt(lines, at);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at) {
  const while_ = (fits) => { let end = at + 1; while (end < lines.length && fits(lines[end])) end += 1; return end; };
  const fence = FENCE.exec(lines[at]);
  if (fence) {
    const end = while_((line) => !isClosing(line, fence[1]));
    return ["code", Math.min(end + 1, lines.length)];
  }
  if (HEADING.test(lines[at])) return ["heading", at + 1];
  if (QUOTE.test(lines[at])) return ["quote", while_((line) => QUOTE.test(line))];
  if (ITEM.test(lines[at])) return ["list", while_((line) => ITEM.test(line) || /^\s+\S/.test(line))];
  if (ROW.test(lines[at]) && RULE_ROW.test(lines[at + 1] || "")) return ["table", while_((line) => ROW.test(line))];
  return ["paragraph", while_((line) => line.trim() && ![FENCE, HEADING, QUOTE, ITEM].some((begin) => begin.test(line)))];
}

function isClosing(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

const MAKERS = {
  code({ lines }) {
    const [, fence, language] = FENCE.exec(lines[0]);
    const closed = lines.length > 1 && isClosing(lines[lines.length - 1], fence);
    return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), language);
  },
  heading({ lines: [line] }) {
    const [, marks, text] = HEADING.exec(line);
    return element(`h${Math.min(marks.length + 2, 6)}`, {}, inline(text));
  },
  quote: ({ lines }, depth) => element("blockquote", {}, nested(lines.map((line) => line.replace(QUOTE, "")), depth)),
  list: ({ lines }, depth) => listOf(lines, depth),
  table({ lines: [head, , ...rows] }) {
    const cells = (line, tag) => line.trim().slice(1, -1).split("|").map((cell) => element(tag, {}, inline(cell.trim())));
    return element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" }, element("table", {},
      element("thead", {}, element("tr", {}, cells(head, "th"))),
      element("tbody", {}, rows.map((row) => element("tr", {}, cells(row, "td"))))));
  },
  paragraph: ({ lines }) => element("p", {}, inline(lines.join("\n").trim())),
};

const DEEPEST = 12;   // quotes and lists within each other; further ones are text

export function blockElement(block, depth = 0) {
  return MAKERS[depth < DEEPEST || block.kind === "code" ? block.kind : "paragraph"](block, depth);
}

function nested(lines, depth) {
  return blocksOf(lines.join("\n")).map((block) => blockElement(block, depth + 1));
}

export function codeBlock(text, language = "") {
  return element("figure", { class: "code" },
    element("figcaption", {}, element("span", {}, language || "text"), copyButton(() => text)),
    element("pre", { tabindex: 0, "aria-label": `Code, ${language || "text"}` }, element("code", {}, text)));
}

// Make a list of lines. Lines that are indented further than the first belong to the item before.
function listOf(lines, depth) {
  const indent = ITEM.exec(lines[0])[1].length, items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent) items.push({ mark: found[2], lines: [found[3]] });
    else items[items.length - 1].lines.push(line.replace(/^\s{1,4}/, ""));
  }
  const ordered = /\d/.test(items[0].mark);
  return element(ordered ? "ol" : "ul", { start: ordered ? parseInt(items[0].mark, 10) : null }, items.map((item) => {
    const [first, ...rest] = item.lines;
    return element("li", {}, inline(first), rest.length ? nested(rest, depth) : null);
  }));
}

const INLINE = [
  [/^(`+)([^]*?[^`])\1(?!`)/, (found) => element("code", {}, found[2].replace(/^ (.+) $/, "$1"))],
  [/^\*\*(?=\S)([^]*?\S)\*\*/, (found) => element("strong", {}, inline(found[1]))],
  [/^\*(?=[^\s*])([^*]*?[^\s*])\*(?!\*)/, (found) => element("em", {}, inline(found[1]))],
  [/^\\([\\`*_#|])/, (found) => found[1]],
];

// Return the elements and texts of a line.
function inline(text) {
  const parts = [];
  let plain = "";
  for (let at = 0; at < text.length;) {
    const special = /[`*\\]/.test(text[at]) ? text.slice(at) : null;
    const [found, make] = (special && INLINE.map(([rule, make]) => [rule.exec(special), make]).find(([found]) => found)) || [];
    if (found) {
      if (plain) parts.push(plain);
      parts.push(make(found));
      plain = "";
      at += found[0].length;
    } else if (special?.[0] === "`") {  // ticks without an end are text, all of them
      const [ticks] = /^`+/.exec(special);
      plain += ticks;
      at += ticks.length;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  return plain ? [...parts, plain] : parts;
}

// Show a text that grows. Blocks that have not changed stay, with what a reader has selected in them.
export function showMarkdown(holder, text) {
  const blocks = blocksOf(text), sources = holder.sources || [];
  const made = blocks.map(({ lines }) => lines.join("\n"));
  let same = 0;
  while (same < made.length && made[same] === sources[same]) same += 1;
  while (holder.children.length > same) holder.lastChild.remove();
  holder.append(...blocks.slice(same).map((block) => blockElement(block)));
  holder.sources = made;
}
