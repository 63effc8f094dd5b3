"use strict";
// The first view: what was compiled, for which machine, and which view answers which question.

// Return the facts of the compilation as rows of a name and a value.
function overviewFacts() {
  const { about, schedule, compilations } = Explorer.data;
  const { model, class: kind, dtype, "decode step": refused, ...versions } = about;
  const [{ plan, tp }] = compilations;
  return [
    ["Model", `${model} (${kind}, ${dtype})`],
    ["Ranks (tp)", formatNumber(tp)],
    ...plan ? byteFacts(plan) : [],
    ...schedule ? stepFacts(schedule) : [],
    ...refused ? [["Decode step", refused]] : [],
    ["Made with", Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ];
}

function byteFacts({ ranks }) {
  const sum = (key) => ranks.reduce((total, rank) => total + rank[key], 0);
  const most = Math.max(...ranks.map((rank) => rank.weight_bytes));
  const share = ranks.length > 1 ? ` on all ranks, at most ${formatBytes(most)} on one` : "";
  return [
    ["Weights", `${formatBytes(sum("weight_bytes"))}${share}`],
    ["KV cache", `${formatBytes(sum("kv_bytes_per_token"))} per token${ranks.length > 1 ? " on all ranks" : ""}`],
  ];
}

function stepFacts(schedule) {
  const { asked, target, makespan_us: us, bandwidth } = schedule;
  return [
    ["Target", [element("b", {}, target.name), `: ${count(asked.workers, "worker")} per rank, `
      + `${formatNumber(target.bytes_per_us / 1000)} GB/s. `,
    element("span", { class: "quiet" }, "--target chooses another machine; tpcompile calibrate measures yours.")]],
    ["Batch and context", `${count(asked.batch, "sequence")} of ${count(asked.context, "token")}`],
    ...us === null ? [] : [["Decode step", `${formatNumber(us / 1000, 2)} ms predicted, `
      + `${formatNumber(asked.batch * 1e6 / us)} tokens per second; a rank loads `
      + `${formatBytes(bandwidth.loaded_bytes)} at most, in ${count(schedule.instructions, "instruction")}`]],
  ];
}

Explorer.view({
  name: "overview",
  title: "Overview",
  available: () => Boolean(Explorer.data.compilations),
  show(root) {
    const others = Explorer.views.filter((view) => view.name !== "overview");
    const rows = others.map((view) => view.available()
      ? [Explorer.link(view.title, { view: view.name }), view.answers]
      : [element("span", { class: "quiet" }, view.title), `${view.answers} Not in this page${view.needs ? `: ${view.needs}` : "."}`]);
    root.replaceChildren(
      element("h2", {}, Explorer.data.title),
      table(null, overviewFacts(), { class: "overview-facts" }),
      element("h2", {}, "Views"),
      table(["view", "what it answers"], rows, { class: "overview-views" }),
      element("p", { class: "quiet" }, "Choose a value in any view, and the panel of details says what it is and why. "
        + "Press / to search, ? for the keys."));
    Explorer.details(element("h2", {}, "Words"), table(null, WORDS));
  },
});
