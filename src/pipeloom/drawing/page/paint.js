// Draws the timelines onto the canvas. However many events there are, only as many are drawn as there are pixels.

const GUTTER = 66, AXIS = 26, HEADER = 24, LANE = 5, CURVE = 26, GAP = 3;
const DETAILED = 3, TEXTURED = 5, LETTERED = 9;

class Painter {
  constructor(canvas, page, view, looks) {
    Object.assign(this, { canvas, page, view, looks });
    this.context = canvas.getContext("2d");
    this.rows = [];
    this.marks = new Marks(this);
    this.strip = document.createElement("canvas").getContext("2d");
    for (const timeline of page.timelines) this.paintLooks(timeline);
  }

  // The look of each event; messages bear the colour of their direction.
  paintLooks(timeline) {
    const numbers = new Map();
    timeline.looks = [];
    timeline.look = Uint16Array.from(timeline.kind, (code, event) => {
      const stage = timeline.stage[event], key = code * 1e7 + stage;
      if (!numbers.has(key)) {
        const kind = timeline.kinds[code], direction = /^(?:SEND|RECV)_([FB])$/.exec(kind);
        numbers.set(key, timeline.looks.push(this.looks.of(direction ? direction[1] : kind, timeline.shades[stage] ?? 0)) - 1);
      }
      return numbers.get(key);
    });
  }

  // Where each rank's row is, from the top of all of them.
  arrange() {
    const { width, height } = this.canvas.getBoundingClientRect();
    this.width = width;
    this.height = height;
    const { messages, memory } = this.view.show;
    const all = this.page.timelines.flatMap((timeline) => timeline.lanes);
    const extra = (lanes) => (messages ? (lanes.length - 1) * (LANE + 1) : 0) + (memory ? CURVE : 0) + GAP;
    const fixed = AXIS + this.page.timelines.length * HEADER + all.reduce((sum, lanes) => sum + extra(lanes), 0);
    const row = Math.min(Math.max(Math.floor((height - fixed - 12) / all.length), 12), 30);
    this.rows = [];
    this.headers = [];
    let y = 0;
    for (const timeline of this.page.timelines) {
      timeline.rows = [];
      this.headers.push({ timeline, y });
      y += HEADER;
      timeline.lanes.forEach((lanes, rank) => {
        const size = row + extra(lanes);
        timeline.rows.push({ timeline, rank, lanes, y, row, size });
        this.rows.push(timeline.rows[rank]);
        y += size;
      });
    }
    this.size = y + 12;
    this.view.top = Math.min(Math.max(this.view.top, 0), Math.max(this.size + AXIS - height, 0));
    const ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  x(time) {
    return GUTTER + ((time - this.view.left) / (this.view.right - this.view.left)) * (this.width - GUTTER);
  }

  time(x) {
    return this.view.left + ((x - GUTTER) / (this.width - GUTTER)) * (this.view.right - this.view.left);
  }

  y(top) {
    return AXIS + top - this.view.top;
  }

  paint() {
    this.arrange();
    const { context, width, height } = this, theme = this.looks.theme;
    context.fillStyle = theme.paper;
    context.fillRect(0, 0, width, height);
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, width - GUTTER, height - AXIS);
    context.clip();
    const seen = this.rows.filter(({ y, size }) => this.y(y + size) > AXIS && this.y(y) < height);
    for (const row of seen) this.paintRow(row, theme);
    if (this.view.show.critical) for (const timeline of this.page.timelines) this.marks.critical(timeline, theme);
    if (this.hovered) this.marks.chosen(this.hovered, theme, 1.5);
    if (this.view.selected) this.marks.chosen(this.view.selected, theme, 2.5);
    context.restore();
    this.paintNames(seen, theme);
    this.paintAxis(theme);
  }

  paintRow({ timeline, rank, lanes, y, row }, theme) {
    const { context } = this, top = this.y(y);
    context.fillStyle = theme.row;
    const left = Math.max(this.x(0), GUTTER), right = Math.min(this.x(timeline.makespan), this.width);
    context.fillRect(left, top, right - left, row);
    this.paintLane(timeline, lanes[0], top, row, theme);
    this.paintFrames(timeline.frames[rank], top, row, theme);
    let below = top + row + 1;
    if (this.view.show.messages) {
      for (const lane of lanes.slice(1)) {
        this.paintLane(timeline, lane, below, LANE, theme);
        below += LANE + 1;
      }
    }
    if (this.view.show.memory) this.paintMemory(timeline, rank, below, CURVE - 3, theme);
  }

  look(timeline, event) {
    return timeline.looks[timeline.look[event]];
  }

  paintLane(timeline, lane, top, height, theme) {
    const { start, end } = timeline, { events, starts } = lane, count = events.length;
    const pixel = (this.view.right - this.view.left) / (this.width - GUTTER);
    let strip = null;
    for (let at = lane.first(this.view.left - pixel); at < count && starts[at] <= this.view.right; ) {
      const event = events[at], left = this.x(start[event]), right = this.x(end[event]);
      if (right - left >= DETAILED) {
        this.paintEvent(timeline, event, left, right, top, height, theme);
        at++;
        continue;
      }
      strip ??= new Uint32Array(Math.ceil(this.width) + 1);
      if (right - left >= 1) {
        const color = this.look(timeline, event).pixel | 0xff000000;
        strip.fill(color >>> 0, Math.max(Math.round(left), 0), Math.max(Math.round(right), 0));
        at++;
        continue;
      }
      // of what falls into one column of pixels, what runs at one time in it is drawn: at another time in each column,
      // lest the columns keep step with the schedule
      const column = Math.floor(left), time = this.time(column + ((column * 0.618034) % 1));
      const middle = Math.max(above(starts, time, at) - 1, at), seen = events[middle];
      strip[column] = (this.look(timeline, seen).pixel | ((end[seen] > time ? 255 : 100) << 24)) >>> 0;
      const next = above(starts, this.time(column + 1), at);
      at = Math.max(at + 1, next - 1 > at && this.x(end[events[next - 1]]) >= column + 2 ? next - 1 : next);
    }
    if (strip) this.paintStrip(strip, top, height);
  }

  // A line of pixels, as high as a lane.
  paintStrip(pixels, top, height) {
    const { canvas } = this.strip;
    if (canvas.width !== pixels.length) {
      canvas.width = pixels.length;
      canvas.height = 1;
    }
    this.strip.putImageData(new ImageData(new Uint8ClampedArray(pixels.buffer), pixels.length, 1), 0, 0);
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(canvas, 0, 0, pixels.length, 1, 0, top, pixels.length, height);
  }

  paintEvent(timeline, event, left, right, top, height, theme) {
    const { context } = this, width = right - left;
    const deep = height / timeline.places[event], y = top + timeline.place[event] * deep;
    const look = this.look(timeline, event);
    const from = Math.max(left, GUTTER - 8), visible = Math.min(right, this.width + 8) - from;
    context.fillStyle = width >= TEXTURED && deep >= TEXTURED + 1 ? look.texture : look.color;
    context.fillRect(from, y, visible, deep);
    if (height === LANE) return;
    context.strokeStyle = theme.edge;
    context.lineWidth = 0.5;
    context.strokeRect(from + 0.25, y + 0.25, visible - 0.5, deep - 0.5);
    if (width >= LETTERED && deep >= LETTERED && timeline.kindOf(event) !== "optimizer") {
      const room = visible - 3, size = Math.min(deep - 3, 12);
      context.font = `${size}px system-ui, Helvetica, Arial, sans-serif`;
      const roomy = this.x(timeline.typical) - this.x(0) > 44;
      const text = roomy ? timeline.text(event) : String(timeline.microbatch[event]);
      if (text.length * size * 0.62 <= room) {
        context.fillStyle = look.ink;
        context.textAlign = "center";
        context.textBaseline = "middle";
        context.fillText(text, from + visible / 2, y + deep / 2 + 0.5);
      }
    }
  }

  // A frame around each composite.
  paintFrames({ starts, ends }, top, height, theme) {
    const { context } = this;
    context.strokeStyle = theme.ink;
    context.lineWidth = 1.5;
    for (let at = above(ends, this.view.left); at < starts.length && starts[at] <= this.view.right; at++) {
      const left = Math.max(this.x(starts[at]), GUTTER - 8), right = Math.min(this.x(ends[at]), this.width + 8);
      if (right - left > 5) context.strokeRect(left + 0.75, top + 0.75, right - left - 1.5, height - 1.5);
    }
  }

  paintMemory(timeline, rank, top, height, theme) {
    const { context } = this, { memory_at, memory_time, memory_size } = timeline;
    const first = memory_at[rank], stop = memory_at[rank + 1], times = memory_time.subarray(first, stop);
    const most = this.page.memory_scale || 1, y = (size) => top + height - (size / most) * height;
    const limit = this.page.memory;
    const right = Math.min(this.x(timeline.makespan), this.width);
    let at = Math.max(above(times, this.view.left) - 1, 0);
    let x = Math.max(this.x(times[at] ?? 0), GUTTER);
    context.fillStyle = theme.faint;
    const over = [];
    while (first + at < stop && x < right) {
      // the most of what falls into one column of pixels
      let size = memory_size[first + at];
      while (at + 1 < times.length && this.x(times[at + 1]) < x + 1) size = Math.max(size, memory_size[first + ++at]);
      const until = at + 1 < times.length ? Math.min(this.x(times[at + 1]), right) : right;
      context.globalAlpha = 0.45;
      context.fillRect(x, y(size), until - x, top + height - y(size));
      if (limit !== null && size > limit) over.push([x, until, size]);
      x = until;
      at++;
    }
    context.globalAlpha = 1;
    context.fillStyle = theme.path;
    for (const [from, until, size] of over) context.fillRect(from, y(size), until - from, y(limit) - y(size));
    if (limit !== null) {
      context.strokeStyle = theme.path;
      context.lineWidth = 1;
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(Math.max(this.x(0), GUTTER), y(limit));
      context.lineTo(right, y(limit));
      context.stroke();
      context.setLineDash([]);
    }
  }

  // The box of an event on the canvas; null where it is not shown.
  box(timeline, event) {
    const row = timeline.rows[timeline.rank(event)];
    const at = row.lanes.findIndex((lane) => lane.name === timeline.stream(event));
    if (at > 0 && !this.view.show.messages) return null;
    const left = this.x(timeline.start[event]), right = Math.max(this.x(timeline.end[event]), left + 1.5);
    const top = this.y(row.y) + (at ? row.row + 1 + (at - 1) * (LANE + 1) : 0), height = at ? LANE : row.row;
    const deep = height / timeline.places[event];
    return { left, right, top: top + timeline.place[event] * deep, height: deep };
  }

  paintNames(rows, theme) {
    const { context } = this;
    context.fillStyle = theme.paper;
    context.fillRect(0, AXIS, GUTTER, this.height - AXIS);
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const { rank, y, row } of rows) {
      context.font = `${Math.min(row, 12)}px system-ui, Helvetica, Arial, sans-serif`;
      context.fillStyle = theme.ink;
      context.fillText(`rank ${rank}`, GUTTER - 8, this.y(y) + row / 2);
    }
    context.textAlign = "left";
    for (const { timeline, y } of this.headers) {
      const at = this.y(y) + HEADER / 2;
      if (at < AXIS - HEADER || at > this.height + HEADER) continue;
      context.font = "bold 12px system-ui, Helvetica, Arial, sans-serif";
      context.fillStyle = theme.ink;
      context.fillText(timeline.title, 10, at);
      const width = context.measureText(timeline.title).width;
      context.font = "12px system-ui, Helvetica, Arial, sans-serif";
      context.fillStyle = theme.faint;
      context.fillText(timeline.headline, 22 + width, at);
    }
  }

  paintAxis(theme) {
    const { context, view } = this, factor = this.page.factor;
    context.fillStyle = theme.paper;
    context.fillRect(0, 0, this.width, AXIS);
    context.strokeStyle = theme.faint;
    context.fillStyle = theme.faint;
    context.lineWidth = 1;
    const width = (view.right - view.left) * factor;
    const least = width / Math.max((this.width - GUTTER) / 90, 1), power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least * (1 - 1e-9));
    context.font = "11px system-ui, Helvetica, Arial, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    context.beginPath();
    context.moveTo(GUTTER, AXIS - 1);
    context.lineTo(this.width, AXIS - 1);
    for (let at = Math.ceil((view.left * factor) / step); at * step <= view.right * factor; at++) {
      const x = this.x((at * step) / factor);
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, AXIS);
      const text = String(Number((at * step).toPrecision(12)));
      if (x + context.measureText(text).width / 2 < this.width) context.fillText(text, x, AXIS - 14);
    }
    context.stroke();
    context.textAlign = "left";
    context.fillText(this.page.unit || "time", 10, AXIS - 14);
  }

  // What a rank holds at a time.
  heldAt(timeline, rank, time) {
    const first = timeline.memory_at[rank], times = timeline.memory_time.subarray(first, timeline.memory_at[rank + 1]);
    return time > timeline.makespan ? null : { timeline, rank, size: timeline.memory_size[first + Math.max(above(times, time) - 1, 0)] };
  }

  // What is at a place of the canvas: an event, an idle stretch, the memory of a rank, or nothing.
  at(x, y) {
    if (x < GUTTER || y < AXIS) return null;
    const row = this.rows.find((each) => y >= this.y(each.y) && y < this.y(each.y + each.size));
    if (!row) return null;
    const { timeline, rank, lanes } = row, below = y - this.y(row.y), time = this.time(x);
    const slack = (this.view.right - this.view.left) / (this.width - GUTTER);
    const number = below < row.row ? 0 : this.view.show.messages ? 1 + Math.floor((below - row.row) / (LANE + 1)) : -1;
    const lane = lanes[number];
    if (!lane) return this.view.show.memory && time >= 0 ? this.heldAt(timeline, rank, time) : null;
    let found = -1, distance = Infinity;
    for (let at = above(lane.starts, time + 2 * slack) - 1; at >= 0 && lane.reach[at] >= time - 2 * slack; at--) {
      const event = lane.events[at];
      const places = timeline.places[event];
      if (places > 1 && Math.floor((below / row.row) * places) !== timeline.place[event]) continue;
      const off = Math.max(timeline.start[event] - time, time - timeline.end[event], 0);
      // an event under the pointer, or one too narrow to hit
      if (off < distance && (off === 0 || timeline.end[event] - timeline.start[event] < 3 * slack)) {
        found = event;
        distance = off;
      }
      if (off === 0 && places === 1) break;
    }
    if (found >= 0) return { timeline, event: found };
    const idle = number === 0 ? timeline.idleAt(rank, time) : -1;
    return idle >= 0 ? { timeline, idle } : null;
  }
}
