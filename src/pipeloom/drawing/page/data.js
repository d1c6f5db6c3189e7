// What the page shows: columns of numbers, unpacked once.

const COLUMN_TYPES = { f8: Float64Array, i4: Int32Array, u1: Uint8Array };

async function readPage() {
  const head = JSON.parse(document.getElementById("head").textContent);
  const text = atob(document.getElementById("data").textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(unpacked).arrayBuffer();
  let offset = 0;
  head.timelines = head.timelines.map((each, number) => {
    const columns = {};
    for (const [name, type, length] of each.columns) {
      const Type = COLUMN_TYPES[type];
      const size = length * Type.BYTES_PER_ELEMENT;
      columns[name] = new Type(buffer.slice(offset, offset + size));
      offset += size;
    }
    return new Timeline(number, each, columns, head.kinds);
  });
  return head;
}

// The first place in sorted numbers whose number is above the given one; found fast if it is soon after `low`.
function above(numbers, value, low = 0) {
  let reach = 1;
  while (low + reach < numbers.length && numbers[low + reach - 1] <= value) {
    low += reach;
    reach *= 2;
  }
  let high = Math.min(low + reach, numbers.length);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

// Events that are drawn in one line, in the order in which they start.
class Lane {
  constructor(timeline, name, events) {
    this.name = name;
    this.events = Int32Array.from(events);
    const { start, end } = timeline;
    if (events.some((event, at) => at && start[event] < start[events[at - 1]])) {
      this.events.sort((one, other) => start[one] - start[other] || one - other);
    }
    this.starts = Float64Array.from(this.events, (event) => start[event]);
    // how far any event up to here reaches
    this.reach = new Float64Array(this.events.length);
    let reach = -Infinity;
    this.events.forEach((event, at) => (this.reach[at] = reach = Math.max(reach, end[event])));
  }

  // Where the events begin that reach beyond a time.
  first(time) {
    return above(this.reach, time);
  }
}

class Timeline {
  constructor(number, head, columns, kinds) {
    Object.assign(this, head, columns);
    this.number = number;
    this.kinds = kinds;
    this.count = this.kind.length;
    this.place = new Uint8Array(this.count); // of a part that runs at the same time as others: its place among them,
    this.places = new Uint8Array(this.count).fill(1); // and how many there are
    this.frames = this.offsets.slice(1).map(() => ({ starts: [], ends: [] })); // the composites of each rank
    this.findComposites();
    this.lanes = this.offsets.slice(1).map((stop, rank) => this.lanesOf(this.offsets[rank], stop));
    this.outputs = null;
    const times = [...this.lanes.flat()[0].events.subarray(0, 999)].map((event) => this.end[event] - this.start[event]);
    this.typical = times.sort((one, other) => one - other)[times.length >> 1] ?? 0; // of the times of actions
  }

  findComposites() {
    for (let event = 0; event < this.count; ) {
      let last = event;
      while (last + 1 < this.count && this.step[last + 1] === this.step[event]
        && this.rank(last + 1) === this.rank(event)) last++;
      if (last > event) {
        const frames = this.frames[this.rank(event)];
        frames.starts.push(this.start[event]);
        frames.ends.push(Math.max(...this.end.subarray(event, last + 1)));
        let together = false;
        for (let at = event + 1; at <= last; at++) together ||= this.start[at] < this.end[at - 1];
        for (let at = event; together && at <= last; at++) {
          this.place[at] = at - event;
          this.places[at] = last - event + 1;
        }
      }
      event = last + 1;
    }
  }

  lanesOf(first, stop) {
    const found = { compute: [], from: [], to: [], shard: [] };
    for (let event = first; event < stop; event++) found[this.stream(event)].push(event);
    return Object.entries(found)
      .filter(([name, events]) => name === "compute" || events.length)
      .map(([name, events]) => new Lane(this, name, events));
  }

  // The line in which an event is drawn.
  stream(event) {
    const kind = this.kindOf(event);
    if (kind.startsWith("RECV")) return "from";
    if (kind.startsWith("SEND")) return "to";
    return ["UNSHARD", "RESHARD", "REDUCE_GRAD"].includes(kind) ? "shard" : "compute";
  }

  kindOf(event) {
    return this.kinds[this.kind[event]];
  }

  rank(event) {
    return above(this.offsets, event) - 1;
  }

  // The action of an event, as schedules write it.
  text(event) {
    const kind = this.kindOf(event);
    if (kind === "optimizer") return kind;
    const microbatch = this.microbatch[event] < 0 ? "" : this.microbatch[event];
    const far = this.far[event] < 0 ? "" : (kind.startsWith("SEND") ? ">" : "<") + this.far[event];
    return `${this.stage[event]}${kind}${microbatch}${far}`;
  }

  inputsOf(event) {
    return [...this.inputs.subarray(this.inputs_at[event], this.inputs_at[event + 1])];
  }

  outputsOf(event) {
    this.outputs ??= this.turnedRound();
    return [...this.outputs.values.subarray(this.outputs.at[event], this.outputs.at[event + 1])];
  }

  turnedRound() {
    const at = new Int32Array(this.count + 1);
    for (const made of this.inputs) at[made + 1]++;
    for (let event = 0; event < this.count; event++) at[event + 1] += at[event];
    const next = at.slice(), values = new Int32Array(this.inputs.length);
    for (let event = 0; event < this.count; event++) {
      for (let each = this.inputs_at[event]; each < this.inputs_at[event + 1]; each++) {
        values[next[this.inputs[each]]++] = event;
      }
    }
    return { at, values };
  }

  idles(rank) {
    const found = [];
    for (let at = this.idle_at[rank]; at < this.idle_at[rank + 1]; at++) found.push(at);
    return found;
  }

  // The idle stretch of a rank at a time, or -1.
  idleAt(rank, time) {
    const starts = this.idle_start.subarray(this.idle_at[rank], this.idle_at[rank + 1]);
    const at = this.idle_at[rank] + above(starts, time) - 1;
    return at >= this.idle_at[rank] && time < this.idle_end[at] ? at : -1;
  }

  rankOfIdle(idle) {
    return above(this.idle_at, idle) - 1;
  }

  // What an idle stretch was spent on, elsewhere: stretches that run back from its end to its start.
  why(idle) {
    const until = this.idle_start[idle], before = this.idle_before[idle];
    if (before >= 0) return [...this.back(before, until)];
    const last = this.last;
    const start = Math.max(this.start[last], until);
    const found = start < this.idle_end[idle]
      ? [{ event: last, start, end: this.idle_end[idle], what: this.what(last) }] : [];
    return [...found, ...this.back(last, until)];
  }

  *back(event, until) {
    let time = this.start[event];
    while (time > until) {
      let cause = this.waited[event];
      if (cause < 0) {
        yield { event, start: until, end: time, what: "overhead" };
        return;
      }
      if (this.end[cause] < time) {
        const crossed = !this.communicates && this.rank(cause) !== this.rank(event);
        const start = Math.max(until, this.end[cause]);
        yield { event: crossed ? cause : event, start, end: time, what: crossed ? "communication" : "overhead" };
        time = start;
      }
      const going = cause;
      // what matters of a receive is the time since its message was sent
      if (this.stream(cause) === "from" && this.waited[cause] >= 0) cause = this.waited[cause];
      if (time > until && this.start[cause] < time) {
        yield { event: going, start: Math.max(until, this.start[cause]), end: time, what: this.what(going) };
      }
      event = cause;
      time = Math.min(time, this.start[cause]);
    }
  }

  what(event) {
    if (this.kindOf(event) === "optimizer") return "optimizer";
    return { compute: "compute", shard: "shard" }[this.stream(event)] ?? "communication";
  }
}
