// What the page says of an action, of an idle stretch and of all of a timeline. Text only, never markup.

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

class Words {
  constructor(page, choose) {
    this.page = page;
    this.choose = choose;
  }

  time(value) {
    const text = String(Number((value * this.page.factor).toPrecision(5)));
    return this.page.unit ? `${text} ${this.page.unit}` : text;
  }

  stretch(start, end) {
    return `${this.time(start)} to ${this.time(end)} (${this.time(end - start)})`;
  }

  name(timeline, event) {
    const words = this.page.words[timeline.kindOf(event)];
    if (timeline.stage[event] < 0) return words;
    const microbatch = timeline.microbatch[event];
    return `${words}, stage ${timeline.stage[event]}${microbatch < 0 ? "" : `, microbatch ${microbatch}`}`;
  }

  where(timeline, event) {
    return `${timeline.text(event)} on rank ${timeline.rank(event)}`;
  }

  // A few lines, for the tip at the pointer.
  short({ timeline, event, idle, rank: holder, size }) {
    if (size !== undefined) {
      const limit = this.page.memory === null ? "" : ` of ${Number(this.page.memory.toPrecision(6))}`;
      return `rank ${holder} holds ${Number(size.toPrecision(6))}${limit}`;
    }
    if (idle !== undefined) {
      const rank = timeline.rankOfIdle(idle);
      return `rank ${rank} is idle\n${this.stretch(timeline.idle_start[idle], timeline.idle_end[idle])}\nclick to read why`;
    }
    const list = (events) => events.slice(0, 4).map((each) => this.where(timeline, each)).join(", ") + (events.length > 4 ? ", ..." : "");
    const lines = [`${timeline.text(event)}: ${this.name(timeline, event)}`, this.stretch(timeline.start[event], timeline.end[event])];
    const waited = timeline.waited[event];
    if (waited >= 0) lines.push(`could not begin before: ${this.where(timeline, waited)}`);
    const inputs = timeline.inputsOf(event), outputs = timeline.outputsOf(event);
    if (inputs.length) lines.push(`waits for: ${list(inputs)}`);
    if (outputs.length) lines.push(`waited for by: ${list(outputs)}`);
    return lines.join("\n");
  }

  // All that there is to say, with buttons that lead on.
  long(chosen) {
    return chosen.idle === undefined ? this.ofEvent(chosen) : this.ofIdle(chosen);
  }

  link(timeline, event) {
    const button = element("button", this.where(timeline, event));
    button.addEventListener("click", () => this.choose({ timeline, event }));
    return button;
  }

  ofEvent({ timeline, event }) {
    const list = element("dl");
    const add = (name, ...values) => list.append(element("dt", name), element("dd", "", ...values));
    const links = (events) => events.slice(0, 20).flatMap((each, at) => [at ? ", " : "", this.link(timeline, each)]);
    add("rank", String(timeline.rank(event)));
    add("from", this.time(timeline.start[event]));
    add("to", this.time(timeline.end[event]));
    add("takes", this.time(timeline.end[event] - timeline.start[event]));
    const waited = timeline.waited[event], inputs = timeline.inputsOf(event), outputs = timeline.outputsOf(event);
    if (waited >= 0) add("began after", this.link(timeline, waited));
    if (inputs.length) add("waits for", ...links(inputs));
    if (outputs.length) add("waited for by", ...links(outputs));
    return [element("h2", timeline.text(event)), element("p", `${this.name(timeline, event)}`), list];
  }

  ofIdle({ timeline, idle }) {
    const rank = timeline.rankOfIdle(idle), start = timeline.idle_start[idle], end = timeline.idle_end[idle];
    const before = timeline.idle_before[idle], causes = timeline.why(idle);
    const parts = [element("h2", `Rank ${rank} is idle`), element("p", this.stretch(start, end))];
    if (before >= 0) parts.push(element("p", "It waits to run ", this.link(timeline, before), "."));
    else parts.push(element("p", "It has nothing left to do while others are at work."));
    const list = element("ol");
    for (const { event, start: from, end: until, what } of causes.slice(0, 30)) {
      const words = { overhead: " began late", communication: ": on its way" }[what] ?? "";
      list.append(element("li", "", this.link(timeline, event), `${words}, ${this.stretch(from, until)}`));
    }
    if (causes.length) parts.push(element("p", "Meanwhile, latest first:"), list);
    if (causes.length > 30) parts.push(element("p", `and ${causes.length - 30} more before these`));
    return parts;
  }

  figures() {
    const { timelines, figures } = this.page;
    const head = element("tr", "", element("th"), ...timelines.map(({ name }) => element("th", name)));
    const rows = figures.map(([name, ...values]) =>
      element("tr", "", element("th", name), ...values.map((value) => element("td", value))));
    return this.table(head, rows);
  }

  ranks() {
    return this.page.timelines.map((timeline) => {
      const head = element("tr", "", ...["rank", "busy", "idle", "peak activations", "peak memory"].map((each) => element("th", each)));
      const rows = timeline.by_rank.map(([name, ...values]) =>
        element("tr", "", element("th", name), ...values.map((value) => element("td", value))));
      return element("details", "", element("summary", `Ranks of ${timeline.title}`), this.table(head, rows));
    });
  }

  table(head, rows) {
    const made = element("div", "", element("table", "", element("thead", "", head), element("tbody", "", ...rows)));
    made.className = "scroll";
    return made;
  }

  legend(looks) {
    const kinds = this.page.legend.map((kind) => [looks.swatch(kind, 0), this.page.words[kind]]);
    const compute = this.page.legend.find((kind) => "FBIW".includes(kind));
    if (compute && this.page.timelines.some(({ shades }) => Object.values(shades).some(Boolean))) {
      kinds.push([looks.swatch(compute, 1), "paler: later stages of the rank"]);
    }
    if (this.page.timelines.some(({ frames }) => frames.some(({ starts }) => starts.length))) {
      const frame = element("i", "");
      frame.className = "frame";
      kinds.push([frame, "runs as one action"]);
    }
    if (this.page.timelines.some(({ communicates }) => communicates)) {
      kinds.push([looks.lanes(), "thin: messages received, messages sent"]);
    }
    return kinds.map(([swatch, words]) => element("span", "", swatch, words));
  }
}
