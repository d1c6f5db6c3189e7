// What part of the page is looked at, and the fragment of the address that says so.

const SHOWN = ["critical", "messages", "memory"];

class View {
  constructor(longest, changed) {
    this.longest = longest;
    this.changed = changed;
    this.show = { critical: false, messages: true, memory: false };
    this.selected = null; // { timeline, event } or { timeline, idle }
    this.left = 0;
    this.right = longest * 1.01;
    this.top = 0;
    this.written = "";
    this.timer = 0;
  }

  fit() {
    this.look(0, this.longest * 1.01);
    this.top = 0;
    this.change();
  }

  // Look at these times, as far as there is something to see.
  look(left, right) {
    const most = this.longest * 1.1, least = this.longest * 1e-6;
    const width = Math.min(Math.max(right - left, least), most);
    left = (left + right - width) / 2;
    this.left = Math.min(Math.max(left, -0.05 * width), Math.max(this.longest - 0.95 * width, -0.05 * width));
    this.right = this.left + width;
    this.change();
  }

  zoom(factor, at = (this.left + this.right) / 2) {
    const least = this.longest * 1e-6, most = this.longest * 1.1, width = this.right - this.left;
    factor = Math.min(Math.max(factor, least / width), most / width);
    this.look(at - (at - this.left) * factor, at + (this.right - at) * factor);
  }

  pan(share) {
    const by = share * (this.right - this.left);
    this.look(this.left + by, this.right + by);
  }

  // Bring a stretch of time into view.
  reveal(start, end) {
    const width = Math.max(this.right - this.left, (end - start) * 1.2);
    if (start >= this.left && end <= this.right) return;
    const middle = (start + end) / 2;
    this.look(middle - width / 2, middle + width / 2);
  }

  select(selected) {
    this.selected = selected;
    this.change();
  }

  toggle(name) {
    this.show[name] = !this.show[name];
    this.change();
  }

  change() {
    this.changed();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), 150);
  }

  write() {
    const short = (value) => Number(value.toPrecision(9));
    const parts = [`t=${short(this.left)},${short(this.right)}`];
    if (this.top) parts.push(`y=${Math.round(this.top)}`);
    parts.push(`show=${SHOWN.filter((name) => this.show[name]).join(",")}`);
    const chosen = this.selected;
    if (chosen) parts.push(`select=${chosen.timeline.number}:${"event" in chosen ? `e${chosen.event}` : `i${chosen.idle}`}`);
    this.written = `#${parts.join("&")}`;
    if (location.hash !== this.written) history.replaceState(null, "", this.written);
  }

  // Take up the view that the fragment asks for; what it asks for and is not there is left.
  read(timelines) {
    if (!location.hash || location.hash === this.written) return;
    const asked = new URLSearchParams(location.hash.slice(1));
    const [left, right] = (asked.get("t") ?? "").split(",").map(Number);
    if (right > left) this.look(left, right);
    const top = Number(asked.get("y"));
    if (top >= 0) this.top = top;
    const show = asked.get("show");
    if (show !== null) for (const name of SHOWN) this.show[name] = show.split(",").includes(name);
    const [, number, what, at] = /^(\d+):([ei])(\d+)$/.exec(asked.get("select") ?? "") ?? [];
    const timeline = timelines[number];
    if (timeline && what === "e" && at < timeline.count) this.selected = { timeline, event: Number(at) };
    else if (timeline && what === "i" && at < timeline.idle_start.length) this.selected = { timeline, idle: Number(at) };
    else this.selected = null;
    this.change();
  }
}
