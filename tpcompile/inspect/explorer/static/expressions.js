"use strict";
// The expression of a value over its operands, and what each pass did to it.

const LONG_EXPRESSION = 200;   // longer ones are folded

// Show what one element of a value is; the expressions of its operands are folded below.
function expressionOf(stage, found, name) {
  const texts = found.line.expressions;
  if (!texts.length || found.line.op === "input") return null;
  const words = found.line.op === "param" ? null
    : element("p", { class: "quiet" }, "One element, at the place i, j, l, …; k runs along an axis that the op binds. Fold out an operand to see its own.");
  return [element("h3", {}, "Expression"), words, equations(stage, found, name), definitions(stage, found)];
}

// Write one equation for each result.
function equations(stage, found, name) {
  const { expressions, op } = found.line;
  return expressions.map((template, place) => {
    const text = Stages.filled(template, found.layer);
    const left = `%${name}${expressions.length > 1 ? `.${place}` : ""} = `;
    return foldedText(op === "param" ? text : left + text, stage);
  });
}

function foldedText(text, { c, data }) {
  const whole = element("pre", { class: "wrapped expression" }, linkedText(text, c, data.name));
  if (text.length <= LONG_EXPRESSION) return whole;
  return element("details", { class: "long" },
    element("summary", { class: "mono" }, `${text.slice(0, LONG_EXPRESSION / 2)}… (${count(text.length, "character")})`), whole);
}

// Fold the expressions of operands, which are made when they are opened.
function definitions(stage, found) {
  const names = [...new Set(Stages.operands(found))].filter((name) => {
    const own = Stages.find(stage, name);
    return own && own.line.expressions.length && !["input", "param"].includes(own.line.op);
  });
  return names.map((name) => {
    const holder = element("details", { class: "definition" }, element("summary", { class: "mono" }, `%${name}`));
    holder.addEventListener("toggle", () => {
      if (!holder.open || holder.children.length > 1) return;
      const own = Stages.find(stage, name);
      holder.append(...[equations(stage, own, name), definitions(stage, own)].flat());
    });
    return holder;
  });
}

// Say what a pass did to the expression of a value: a part of a sentence, or nothing.
function proofWords(c, step) {
  const stage = Stages.at(c, step.s), { line, change } = step;
  if (stage.data.unproved) return ["; ", element("strong", {}, "not proved"), `: ${stage.data.unproved}`];
  if (!change) {
    const compared = step.old !== null && line && line.op !== "param" && line.expressions.length === 1;
    return compared ? "; the same expression" : "";
  }
  const by = change.rewrites.map(([rewrite, says]) =>
    ["; equal by the rewrite ", element("strong", {}, rewrite), `: ${says}`]);
  if (!change.terms.length) return by;
  const [before, after] = change.terms.map((text) => foldedText(Stages.filled(text, step.layer), stage));
  return [by, by.length ? "; " : "; another expression, which leaves the results of the graph equal: ",
    "before", before, "after", after];
}

// Say that passes that the history does not name leave the expression as it is.
function otherPasses(stage, steps) {
  const named = new Set(steps.map((step) => step.s));
  const first = Math.min(...named);
  const others = Array.from({ length: stage.s - first }, (_, n) => first + n + 1).filter((s) => !named.has(s));
  const unproved = others.map((s) => Stages.at(stage.c, s).data).filter((data) => data.unproved).map((data) => data.name);
  if (!others.length) return null;
  return element("p", { class: "quiet" }, unproved.length
    ? `Not proved: ${unproved.join(", ")}.`
    : `${count(others.length, "other pass", "other passes")} left its expression as it is, which is proved.`);
}
