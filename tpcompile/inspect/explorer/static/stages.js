"use strict";
// The stages of compilations: lines of text in which repeated layers are folded, and the identity of
// values from stage to stage. A template has "\u0001" for the number of its layer, "\u0002" for
// that of the layer before, and "\u0003" for that of the layer after.

const Stages = {
  all() {
    return Explorer.data.compilations;
  },

  // Return a stage of a compilation with the tables that it refers to.
  at(c, s) {
    const compilation = this.all()[c];
    const recording = Explorer.data.recordings[compilation.recording];
    return { c, s, compilation, recording, data: recording.stages[compilation.stages[s]] };
  },

  // Return the compilation and the stage of a place: the last stage that changed something by default.
  ofPlace(place) {
    const all = this.all();
    const c = all[place.c] ? Number(place.c) : 0;
    const names = all[c].stages.map((_, s) => this.at(c, s).data.name);
    let s = names.indexOf(place.pass);
    if (s < 0) s = names.map((_, n) => n).filter((n) => n === 0 || this.changed(c, n)).pop();
    return this.at(c, s);
  },

  changed(c, s) {
    if (s === 0) return true;
    const [now, before] = [this.at(c, s).data, this.at(c, s - 1).data];
    return JSON.stringify(now.sections) !== JSON.stringify(before.sections);
  },

  filled(text, layer) {
    if (layer === null) return text;
    return text.replaceAll("\u0001", layer).replaceAll("\u0002", layer - 1).replaceAll("\u0003", layer + 1);
  },

  // Return the sections of a stage: title, first and last layer (null outside of layers), and lines.
  sections(stage) {
    return stage.data.sections.map(([title, first, last, body], number) => ({
      number, title, first, last,
      lines: stage.recording.bodies[body].map((line) => stage.recording.lines[line]),
    }));
  },

  title(section) {
    if (section.first === null || section.first === section.last) return section.title;
    return `layers ${section.first} to ${section.last}`;
  },

  // Return the layer of a section to show: that of the place if the section has it.
  layerOf(section, place) {
    const wanted = place.layer === undefined ? layerOfName(place.node) : Number(place.layer);
    const inside = section.first !== null && wanted !== null && wanted >= section.first && wanted <= section.last;
    return inside ? wanted : section.first;
  },

  // Return the value of this name in a stage: its section, layer and line; or null.
  find(stage, name) {
    const layer = layerOfName(name);
    const general = generalName(name);
    for (const section of this.sections(stage)) {
      const inside = section.first !== null && section.first <= layer && layer <= section.last;
      for (const line of section.lines)
        if (line.name === name || (inside && layer !== null && line.name === general))
          if (section.first === null || inside) return { section, layer: section.first === null ? null : layer, line };
    }
    return null;
  },

  operands(found) {
    return found.line.operands.map((name) => this.filled(name, found.layer));
  },

  // Return the values of a stage that read a value, by name. Layers that only repeat are left out,
  // except for those of the value.
  readers(stage, name) {
    const readers = [];
    const layer = layerOfName(name);
    for (const section of this.sections(stage)) {
      const layers = section.first === null ? [null]
        : [...new Set([section.first, layer, layer === null ? null : layer + 1, section.last])]
          .filter((n) => n !== null && n >= section.first && n <= section.last);
      for (const own of layers)
        for (const line of section.lines)
          if (line.operands.some((operand) => this.filled(operand, own) === name))
            readers.push(line.op === "return" ? "" : this.filled(line.name, own));
    }
    return readers;
  },

  // Return what became of a value of stage s - 1 in stage s: [fate, name], or ["kept", name].
  fate(c, s, name) {
    const { data } = this.at(c, s);
    const layer = layerOfName(name);
    const general = generalName(name);
    const found = data.fates[name] || data.fates[general];
    if (!found) return ["kept", name];
    return [found[0], this.filled(found[1], layer)];
  },

  // Return how a pass changed the expression of a value: the rewrites and both terms; or null.
  change(c, s, name) {
    const { changes } = this.at(c, s).data;
    const found = changes[name] || changes[generalName(name)];
    return found && found.rewrites ? found : null;
  },

  // Return why readers of a collective need it: each with the rule that it would break.
  needs(stage, name) {
    const layer = layerOfName(name);
    const general = generalName(name);
    return (stage.data.needs[name] || stage.data.needs[general] || [])
      .map((need) => ({ ...need, reader: this.filled(need.reader, layer) }));
  },

  // Return the name in a later stage of a value, or null if it is gone.
  follow(c, from, to, name) {
    for (let s = from + 1; s <= to; s++) {
      const [fate, next] = this.fate(c, s, name);
      if (fate === "dropped" || fate === "fused") return null;
      name = next;
    }
    return name;
  },

  // Return the name in stage s - 1 of the value that `name` replaced or was, or null if it is new.
  before(c, s, name) {
    const layer = layerOfName(name);
    for (const [old, [fate, next]] of Object.entries(this.at(c, s).data.fates)) {
      const own = this.filled(old, layer);
      if (fate === "replaced" && this.filled(next, layer) === name && this.became(c, s, own, fate, name)) return own;
    }
    const [fate] = this.fate(c, s, name);
    return fate === "kept" && this.find(this.at(c, s - 1), name) ? name : null;
  },

  // Return the values of stage s - 1 that were fused into a value of stage s.
  parts(c, s, name) {
    const layer = layerOfName(name);
    return Object.entries(this.at(c, s).data.fates)
      .filter(([, [fate, next]]) => fate === "fused" && this.filled(next, layer) === name)
      .map(([old]) => this.filled(old, layer))
      .filter((old) => this.became(c, s, old, "fused", name));
  },

  // Say whether a value of stage s - 1 had this fate: a template may be that of other layers only.
  became(c, s, old, fate, name) {
    const [found, next] = this.fate(c, s, old);
    return found === fate && next === name && this.find(this.at(c, s - 1), old) !== null;
  },

  // Return what each pass did to a value, from its first stage: [{stage, what, name, line}].
  history(stage, name) {
    const steps = [];
    let { s } = stage;
    while (name !== null) {
      const now = this.find(this.at(stage.c, s), name);
      if (s === 0) {
        steps.push({ s, what: "captured", name, line: now && now.line, layer: now && now.layer });
        break;
      }
      const old = this.before(stage.c, s, name);
      const was = old === null ? null : this.find(this.at(stage.c, s - 1), old);
      const parts = this.parts(stage.c, s, name);
      let what = null;
      if (old === null) what = parts.length ? "made of several values" : "inserted";
      else if (this.fate(stage.c, s, old)[0] === "replaced") what = "replaced";
      else if (was && now && was.line.text !== now.line.text) what = "changed";
      const change = this.change(stage.c, s, name);
      if (!what && change) what = "kept";
      if (what) steps.push({ s, what, name, old, parts, line: now && now.line, layer: now && now.layer, was, change });
      name = old;
      s -= 1;
    }
    return steps.reverse();
  },
};

// Return the number of the layer in a name such as l12_q_proj, or null.
function layerOfName(name) {
  const found = /^l(\d+)_/.exec(name || "");
  return found ? Number(found[1]) : null;
}

// Return the name in a template: a value of a layer has a mark in place of the layer's number.
function generalName(name) {
  return name.replace(/^l\d+_/, "l\u0001_");
}

// Return text with its values as links, which show their details.
function linkedText(text, c, pass) {
  const parts = text.split(/(%[A-Za-z_]\w*)/);
  return parts.map((part) => part.startsWith("%") && part.length > 1
    ? Explorer.link(part, { node: part.slice(1), c, pass }, { class: "value" })
    : part);
}
